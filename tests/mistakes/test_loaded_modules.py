"""Mistakes with loaded modules: calls and saves, each with its error and the whole text of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotexport_runtime
from aotexport_runtime import ArgumentInvalid, CallInvalid, OutputExists
from tests.mistakes.told import check_raises, rows_of

X = torch.ones(3, 4)
MAKE = "To make a bundle of a model, export it (`aotexport.export`)"


def call(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: aotexport_runtime.load("bundle").eval()(*args, **kwargs)


def with_module(act: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: act(aotexport_runtime.load("bundle"))


def save(path: Any = "new", wrap: Callable[[Any], Any] = lambda module: module) -> Callable[[], Any]:
    return with_module(lambda module: aotexport_runtime.save(wrap(module), path))


def refused(*violations: str) -> str:
    return "\n".join(["the call does not fit program `infer`:", *(f"  - {violation}" for violation in violations)])


# what the user does, class of the error, its whole text
CALLS = {
    "nothing": (call(), CallInvalid, refused("`input`: missing; it was passed at capture")),
    "too_much": (call(X, X), CallInvalid, refused("takes 1 positional arguments (`input`), got 2")),
    "other_name": (
        call(x=X),
        CallInvalid,
        refused("`x`: unexpected keyword argument; there are `input`", "`input`: missing; it was passed at capture"),
    ),
    "list": (call([X]), CallInvalid, refused("`input`: expected a tensor float32, got list")),
    "other_dtype": (call(X.long()), CallInvalid, refused("`input`: expected dtype float32, got int64")),
    "other_width": (call(X[:, :3]), CallInvalid, refused("`input`: expected shape [batch, 4], got [3, 3] at axis 1")),
    "too_many_rows": (call(torch.ones(9, 4)), CallInvalid, refused("`input`: size 0: `batch` is 9, outside [1:8]")),
    "other_device": (call(X.to("meta")), CallInvalid, refused("`input`: expected a tensor on cpu, got one on meta")),
}

SAVES = {
    "no_bundle": (
        lambda: aotexport_runtime.save(nn.Linear(4, 2), "new"),
        ArgumentInvalid,
        f"`module`: expected a loaded bundle, got Linear. {MAKE}",
    ),
    "wrapper": (
        save(wrap=lambda module: nn.Sequential(module, nn.Linear(2, 3))),
        ArgumentInvalid,
        "`module`: expected a loaded bundle, got Sequential. It holds one as `0`: save that one, or export the whole "
        "(`aotexport.export`)",
    ),
    "over_itself": (
        save("bundle"),
        OutputExists,
        "`bundle` exists; give force=True (--force) to replace it, or choose another place",
    ),
}


@pytest.mark.parametrize(("act", "kind", "text"), rows_of(call=CALLS, save=SAVES))
def test_mistake_with_a_loaded_module_is_told_in_whole(
    act: Callable[[], Any], kind: type[Exception], text: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_raises(act, kind, text, here, capfd)
