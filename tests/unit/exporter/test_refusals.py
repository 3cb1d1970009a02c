"""Who is at fault in a stage of the export: the model or torch, which refuse, or aotexport, which has a bug."""

import platform
import textwrap

import pytest
import torch

from aotexport.errors import AttemptFailed, ExportFailed, InternalError
from aotexport.model import refusals
from aotexport.model.refusals import attempt
from aotexport_runtime import NotSupported
from tests.refusals import refusal


def ours(text, **names):
    """Return the function `run` of code that stands in a file of aotexport."""
    namespace = {"torch": torch, **names}
    exec(compile(textwrap.dedent(text), refusals.__file__, "exec"), namespace)
    return namespace["run"]


def stage(function, context=None):
    """Call a function as a stage of the export does."""
    context = attempt("functional graph") if context is None else context
    ours("def run():\n    with context:\n        function()", context=context, function=function)()


BUGS = {
    "misspelt name": "def run():\n    return misspelt",
    "misspelt attribute": "def run():\n    return torch.nn.Identity().misspelt",
    "attribute of None": "def run():\n    return None.misspelt",
    "failed assertion": "def run():\n    assert not torch",
    "wrong argument": "def other(): ...\ndef run():\n    return other(misspelt=1)",
}
"""What wrong code of ours raises, whoever calls it."""

BUGS_OF_THE_STAGE = {
    "missing key": "def run():\n    return {}['key']",
    "missing item": "def run():\n    return [][0]",
    "bad value": "def run():\n    return int('number')",
    "missing attribute": "def run():\n    return getattr(torch, 'misspelt')",
}
"""What the model's code may have led ours to, where that calls it."""


@pytest.mark.parametrize("text", [*BUGS.values(), *BUGS_OF_THE_STAGE.values()], ids=[*BUGS, *BUGS_OF_THE_STAGE])
def test_error_out_of_our_own_code_is_an_internal_error(text):
    with pytest.raises(InternalError) as raised:
        stage(ours(text))
    cause = raised.value.__cause__
    assert cause is not None
    assert not isinstance(raised.value, ExportFailed)
    assert cause.__traceback__ is not None


@pytest.mark.parametrize("text", BUGS_OF_THE_STAGE.values(), ids=BUGS_OF_THE_STAGE)
def test_error_where_the_model_calls_our_code_is_a_refusal(text):
    stand_in = ours(text)

    with pytest.raises(AttemptFailed):
        stage(lambda: stand_in())


@pytest.mark.parametrize("kind", [ValueError, TypeError, AttributeError, NameError, AssertionError, KeyError])
def test_any_error_of_the_models_code_is_a_refusal_with_its_line(kind):
    def model():
        raise kind("of the model")

    with pytest.raises(AttemptFailed) as raised:
        stage(model)
    assert type(raised.value.error) is kind
    assert raised.value.__cause__ is raised.value.error
    assert str(raised.value).startswith(f"{__file__}:{model.__code__.co_firstlineno + 1}: in model: {kind.__name__}: ")


def test_error_of_torch_in_c_that_our_code_calls_is_a_refusal():
    with pytest.raises(AttemptFailed):
        stage(ours("def run():\n    return torch.ones(2) + torch.ones(3)"))


def test_errors_of_the_exporter_pass_and_those_of_a_bundle_in_the_model_are_refusals():
    with pytest.raises(ExportFailed, match=r"^ours$") as raised, attempt("forward graph"):
        raise ExportFailed("ours")
    assert raised.value.error is raised.value
    with pytest.raises(AttemptFailed), attempt("forward graph"):
        raise NotSupported("of a bundle that the model calls")


def test_internal_error_says_stage_line_versions_and_what_to_do():
    run = ours(BUGS["misspelt name"])

    def model():
        return run()

    assert refusal(InternalError, stage, model) == (
        f"a bug of aotexport, in the stage `functional graph`: {__file__}:{model.__code__.co_firstlineno + 1}: in "
        "model: NameError: name 'misspelt' is not defined. Nothing was written. Please report it, with these versions "
        f"(aotexport 0.1.0, torch {torch.__version__}, Python {platform.python_version()}) and the traceback"
    )
