"""Operator schemas: compatible means that a call made for the old one binds the same under the new one."""

from hypothesis import given
from hypothesis import strategies as st

from aotexport_runtime.execution.ops import is_compatible
from tests.property.profile import quick

NAMES = [f"a{index}" for index in range(6)]
arguments = st.lists(
    st.builds(lambda name, default: f"int {name}" + default, st.sampled_from(NAMES), st.sampled_from(["", "=0", "=1"])),
    max_size=5,
    unique_by=lambda text: text.split("=")[0],
)


def schema(positional: list[str], keyword_only: list[str]) -> str:
    return f"a::f({', '.join([*positional, *(['*'] if keyword_only else []), *keyword_only])}) -> Tensor"


@st.composite
def schemas(draw) -> tuple[list[str], list[str]]:
    drawn = draw(arguments)
    cut = draw(st.integers(0, len(drawn)))
    return drawn[:cut], drawn[cut:]


def bound(call: tuple[list[str], list[str]], by: tuple[list[str], list[str]]) -> dict[str, str] | None:
    """Return what each argument of `by` is bound to in a call with all arguments of `call`; None: it does not bind.

    A value is the text of the captured argument that it is meant for; a default is its own text.
    """
    positional, keyword_only = by
    if len(call[0]) > len(positional):
        return None
    given_ = dict(zip(positional, call[0], strict=False))
    for argument in call[1]:
        parameter = next((p for p in (*positional, *keyword_only) if p.split("=")[0] == argument.split("=")[0]), None)
        if parameter is None or parameter in given_:
            return None
        given_[parameter] = argument
    for parameter in (*positional, *keyword_only):
        if parameter not in given_:
            if "=" not in parameter:
                return None
            given_[parameter] = "default"
    return given_


@quick
@given(schemas())
def test_schema_is_compatible_with_itself(drawn):
    assert is_compatible(schema(*drawn), schema(*drawn))


@quick
@given(schemas(), schemas())
def test_compatible_schema_binds_every_captured_argument_to_itself(old, new):
    if not is_compatible(schema(*old), schema(*new)):
        return
    binding = bound(old, new)
    assert binding is not None
    assert all(value in (parameter, "default") for parameter, value in binding.items())


@quick
@given(schemas(), st.data())
def test_schema_with_an_optional_argument_more_stays_compatible_only_behind_the_positional_ones(old, data):
    positional, keyword_only = old
    place = data.draw(st.integers(0, len(positional)))
    new = [*positional[:place], "int more=0", *positional[place:]]
    assert is_compatible(schema(*old), schema(new, keyword_only)) == (place == len(positional))


@quick
@given(schemas(), st.data())
def test_schema_that_lost_an_argument_is_not_compatible(old, data):
    positional, keyword_only = old
    if not positional and not keyword_only:
        return
    lost = data.draw(st.sampled_from([*positional, *keyword_only]))
    new = [a for a in positional if a != lost], [a for a in keyword_only if a != lost]
    assert not is_compatible(schema(*old), schema(*new))
