"""`--dynamic`: its grammar, its place in the nested `dynamic_shapes`, and that calls are held to what it says."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import aotexport_runtime
from aotexport.errors import ModelFileInvalid
from aotexport.model.dynamic_option import DynamicSize, merge_dynamic, parse_dynamic
from aotexport.model.programs import Example, ModelSource
from tests.refusals import refusal


def source_of(function: Any, *args: Any, dynamic_shapes: Any = None, **kwargs: Any) -> ModelSource:
    return ModelSource("model.py", function, Example(args, kwargs, dynamic_shapes), Path())


def with_shapes(source: ModelSource, dynamic_shapes: Any) -> ModelSource:
    return dataclasses.replace(source, example=dataclasses.replace(source.example, dynamic_shapes=dynamic_shapes))


def spelled(dynamic_shapes: Any) -> Any:
    """Return nested shapes with every dimension as `name[min:max]`."""
    if isinstance(dynamic_shapes, dict):
        return {key: spelled(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, tuple):
        return tuple(spelled(value) for value in dynamic_shapes)
    return None if dynamic_shapes is None else f"{dynamic_shapes.__name__}[{dynamic_shapes.min}:{dynamic_shapes.max}]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:0=batch", DynamicSize("", "x", (), 0, "batch")),
        ("x:-1=batch[1:64]", DynamicSize("", "x", (), -1, "batch", (1, 64))),
        ("x:0=batch[:64]", DynamicSize("", "x", (), 0, "batch", (None, 64))),
        (" x:0 = 2 * half[1:8] + 3 ", DynamicSize("", "x", (), 0, "half", (1, 8), 2, 3)),
        ("x:0=n-1", DynamicSize("", "x", (), 0, "n", None, 1, -1)),
        ("batch['ids']:1=n", DynamicSize("", "batch", ("ids",), 1, "n")),
        ("layers[0].cache[12]['k']:2=n", DynamicSize("", "layers", (0, "cache", 12, "k"), 2, "n")),
        (" steps = 2 * n[-4:4] - 1 ", DynamicSize("", "steps", (), None, "n", (-4, 4), 2, -1)),
        ('options["a:0=b"]=n[1:]', DynamicSize("", "options", ("a:0=b",), None, "n", (1, None))),
    ],
)
def test_dynamic_option_in_the_grammar_is_read(text: str, expected: DynamicSize) -> None:
    assert dataclasses.replace(parse_dynamic(text), text="") == expected


SYNTAX = (
    "write INPUT:AXIS=NAME[MIN:MAX], for example 'x:0=batch[1:64]' or 'batch[\"ids\"]:1=2*half'; for an integer "
    "INPUT=NAME[MIN:MAX], for example 'steps=count[1:100]'"
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x:0=batch[1-64]", SYNTAX),
        ("x:0=batch*2", SYNTAX),
        ("steps=5", SYNTAX),
        ("x:0=batch[8:8]", "[8:8] leaves no choice of sizes"),
        ("x:0=batch[-2:8]", "[-2:8] has a size below 0"),
        ("x:0=0*batch", "the factor is 0"),
    ],
)
def test_dynamic_option_outside_the_grammar_is_refused(text: str, why: str) -> None:
    assert refusal(ModelFileInvalid, parse_dynamic, text) == f"--dynamic {text!r}: {why}"


def nested(x, batch, scale=1.0, *rest, **named): ...


EXAMPLE = source_of(
    nested,
    torch.zeros(4, 3),
    {"ids": torch.zeros(4, 8), "parts": [torch.zeros(2), 5], 7: torch.zeros(1)},
    2.0,
    torch.zeros(6),
    extra=torch.zeros(9),
)
NOTHING = {"x": None, "batch": {"ids": None, "parts": (None, None), 7: None}, "scale": None, "rest": (None,)}
NOTHING |= {"named": {"extra": None}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["x:0=n[1:8]"], {"x": {0: "n[1:8]"}}),
        (["x:-1=n[1:8]"], {"x": {1: "n[1:8]"}}),
        (["batch['ids']:1=n[1:8]"], {"batch": {"ids": {1: "n[1:8]"}, "parts": (None, None), 7: None}}),
        (["batch.parts[0]:0=n[1:8]"], {"batch": {"ids": None, "parts": ({0: "n[1:8]"}, None), 7: None}}),
        (["batch[7]:0=n[1:8]"], {"batch": {"ids": None, "parts": (None, None), 7: {0: "n[1:8]"}}}),
        (["rest[0]:0=n[1:8]"], {"rest": ({0: "n[1:8]"},)}),
        (["extra:0=n[1:8]"], {"named": {"extra": {0: "n[1:8]"}}}),
        (["x:0=n[1:8]", "x:1=n"], {"x": {0: "n[1:8]", 1: "n[1:8]"}}),
        (["batch.parts[1]=n[-8:8]"], {"batch": {"ids": None, "parts": (None, "n[-8:8]"), 7: None}}),
        (
            ["x:0=n", "rest[0]:0=n+2", "x:1=2*n[1:8]"],
            {"x": {0: "n[1:8]", 1: "2*n[2:16]"}, "rest": ({0: "n + 2[3:10]"},)},
        ),
    ],
)
def test_dynamic_options_take_their_place_among_the_arguments(options: list[str], expected: dict[str, Any]) -> None:
    assert spelled(merge_dynamic(EXAMPLE, options)) == {**NOTHING, **expected}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["x:0=m[1:8]"], {0: "m[1:8]"}),
        (["x:1=n"], {0: "n[2:9]", 1: "n[2:9]"}),
        (["x:1=n[1:8]"], {0: "n[1:8]", 1: "n[1:8]"}),
    ],
)
def test_dynamic_option_wins_over_the_files_dynamic_shapes(options: list[str], expected: dict[int, str]) -> None:
    source = with_shapes(EXAMPLE, {"x": {0: Dim("n", min=2, max=9)}})
    assert spelled(merge_dynamic(source, options)) == {**NOTHING, "x": expected}


TENSORS = "x, batch['ids'], batch['parts'][0], batch[7], rest[0], named['extra']; its integers are batch['parts'][1]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["y:0=n"], f"'y:0=n': there is no such tensor in the example call; its tensors are {TENSORS}"),
        (["scale:0=n"], f"'scale:0=n': it is no tensor and no integer in the example call; its tensors are {TENSORS}"),
        (["batch.parts[1]:0=n"], "'batch.parts[1]:0=n': it is an integer, which has no axes; write INPUT=NAME"),
        (["x:0=n[1:8]", "x:1=n[2:8]"], "'x:1=n[2:8]': `n` has other bounds in another --dynamic"),
    ],
)
def test_dynamic_option_that_does_not_fit_the_example_is_refused(options: list[str], message: str) -> None:
    assert refusal(ModelFileInvalid, merge_dynamic, EXAMPLE, options) == f"--dynamic {message}"


def repeated(x, steps, more):
    return x * steps + more


def test_integer_is_held_to_its_range_and_relation(new_bundle: Callable[..., Path]) -> None:
    source = source_of(repeated, torch.ones(3), 3, 4)
    shapes = merge_dynamic(source, ["steps=n[-4:8]", "more=n+1"])
    module = aotexport_runtime.load(new_bundle(repeated, *source.example.args, dynamic_shapes=shapes))
    assert module(torch.ones(3), -4, -3).tolist() == [-7] * 3
    for steps, more, why in (
        (9, 10, "`steps`: `n` is 9, outside [-4:8]"),
        (2, 4, "the program holds only where (more == (1 + n)); here n=2, more=4"),
    ):
        assert why in refusal(aotexport_runtime.CallInvalid, module, torch.ones(3), steps, more)
