"""What an optimizer makes of parameters in a training step: the user's description of a program `step`."""

from __future__ import annotations

import ast
import fnmatch
import functools
import glob
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotexport.errors import ModelFileInvalid
from aotexport.model.model_file import open_model_file
from aotexport_runtime.module.optimizer import FORMS, optimizer_of
from aotexport_runtime.schema.manifest import OPTIMIZER, Manifest
from aotexport_runtime.values.arguments import check_type

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.Adafactor, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta),
    )
}
"""Optimizers of torch by name."""

_CHOSEN = (*FORMS, "decoupled_weight_decay")
"""Options of groups that the class chooses, not the caller."""


@dataclass(frozen=True)
class Step:
    """A training step to capture, as the program `step`: forward, loss, backward, clipping and the optimizer.

    Attributes:
        optimizer: a class of optimizers, or where one is: `adamw` and the like of `torch.optim`,
            `package.module:Class` or `file.py:Class`. Its code branches on no values of tensors.
        options: its keyword arguments; all but `lr`, the first learning rate, are fixed in the program.
        groups: options of parameters whose names match one of some patterns, by these, with spaces between them:
            `{"*.bias *norm*": {"weight_decay": 0.0}}`. Each is a group of the optimizer, with a learning rate of its
            own; the first that matches counts.
        clip: clip gradients by their norm, to a `max_norm` that each step takes.
        accumulate: add the gradients that parameters have in `grad` before a step; it multiplies the loss by a `scale`.
        outputs: patterns of names of results that a step returns beside the loss, with spaces between them: `logits`.
    """

    optimizer: str | type[torch.optim.Optimizer] = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    clip: bool = False
    accumulate: bool = False
    outputs: str = ""

    def __post_init__(self) -> None:
        """Refuse what no optimizer is made of (`ModelFileInvalid`), and other types (`ArgumentInvalid`)."""
        check_type("outputs", self.outputs, str, "patterns in one string, with spaces between them")
        check_type("groups", self.groups, Mapping, "options by patterns")
        for options in (self.options, *self.groups.values()):
            check_type("options", options, Mapping, "options by name")
            self._check(options)
        for name, value in self.options_shown(self.options).items():
            if not isinstance(value, bool | int | float | str | list | None):
                raise ModelFileInvalid(f"step: {self.name}: `{name}` is a {type(value).__name__}, and no number")

    def _check(self, options: Mapping[str, Any]) -> None:
        taken = [name for name in inspect.signature(self.kind).parameters if name not in ("params", *FORMS)]
        for name, value in options.items():
            if name not in taken:
                raise ModelFileInvalid(f"step: {self.name} takes no `{name}`; it takes {', '.join(taken)}")
            if name == "dampening" and value:
                raise ModelFileInvalid("step: `dampening` counts from the second step on only, and a program is one")

    @functools.cached_property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer."""
        found: Any = self.optimizer
        if isinstance(found, str) and ":" in found:
            file = open_model_file(found)
            found = getattr(file.module, file.attribute, None)
        found = OPTIMIZERS.get(found, found) if isinstance(found, str) else found
        if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
            raise ModelFileInvalid(
                f"step: no optimizer `{self.optimizer}`; there are {', '.join(OPTIMIZERS)}, and package.module:Class"
            )
        return found

    @property
    def name(self) -> str:
        """Name of that class: of torch's alone, of others with their module."""
        known = OPTIMIZERS.get(self.kind.__name__.lower()) is self.kind
        return self.kind.__name__ if known else f"{self.kind.__module__}:{self.kind.__qualname__}"

    def made(self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any], **forms: bool) -> Any:
        """Return an optimizer of parameters; `forms` are those that it shall have, beside the default ones."""
        known = inspect.signature(self.kind).parameters
        chosen: dict[str, Any] = {name: forms.get(name, False) for name in FORMS if name in known}
        try:
            return self.kind(list(parameters), **{**options, **chosen})
        except (TypeError, ValueError) as error:
            raise ModelFileInvalid(f"step: {self.name}: {error}") from error

    def options_shown(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of an optimizer with these, as torch has them in the groups of a new one."""
        return self.shown(self.made([torch.zeros(1)], options))

    @staticmethod
    def shown(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the options of an optimizer's first group as a bundle has them."""
        group = optimizer.param_groups[0]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name != "params"
        }

    def options_of(self, name: str) -> tuple[int, dict[str, Any]]:
        """Return the index of a parameter's group, 0: of none of `groups`, and its options."""
        for index, (pattern, options) in enumerate(self.groups.items(), 1):
            if any(fnmatch.fnmatchcase(name, each) for each in pattern.split()):
                return index, {**self.options, **options}
        return 0, dict(self.options)


def step_of(text: str | Step) -> Step:
    """Return the step of a text as `--step` takes it: `adamw`, `sgd:momentum=0.9,clip=True`, `file.py:Class:lr=0.1`.

    `ModelFileInvalid`: it is none.
    """
    if isinstance(text, Step):
        return text
    name, _, rest = text.partition(":")
    if name not in OPTIMIZERS and (attribute := rest.partition(":")[0]).isidentifier():
        name, rest = f"{name}:{attribute}", rest[len(attribute) + 1 :]
    try:
        call: Any = ast.parse(f"f({rest})", mode="eval").body
        options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or None in options:
            raise ValueError
    except (SyntaxError, ValueError):
        raise ModelFileInvalid(f"step: `{text}` is no optimizer with options, as `sgd:momentum=0.9`") from None
    own = {key: options.pop(key) for key in ("clip", "accumulate", "outputs") if key in options}
    return Step(name, options, **own)


def step_in(manifest: Manifest) -> Step | None:
    """Return the step of a bundle, for the same parameters in another; None: it has none.

    `ModelFileInvalid`: it is by code that is not torch's, which a bundle may not name.
    """
    if OPTIMIZER not in manifest.extensions:
        return None
    found = optimizer_of(manifest)
    if found.optimizer.lower() not in OPTIMIZERS:
        raise ModelFileInvalid(f"the bundle's step is by `{found.optimizer}`, which is not torch's: give `step` again")
    own = [{name: value for name, value in group.options.items() if name not in _CHOSEN} for group in found.groups]
    names = [" ".join(map(glob.escape, group.parameters)) for group in found.groups]
    groups = dict(zip(names[1:], own[1:], strict=True))
    return Step(found.optimizer.lower(), own[0], groups, found.clip, found.accumulate, found.outputs)
