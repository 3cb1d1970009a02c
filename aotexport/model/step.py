"""What an optimizer makes of parameters in a training step: the user's description of a program `step`."""

from __future__ import annotations

import ast
import fnmatch
import glob
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotexport.errors import ModelFileInvalid
from aotexport_runtime.module.optimizer import FORMS, optimizer_of
from aotexport_runtime.schema.manifest import OPTIMIZER, Manifest

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)
}
"""Optimizers whose state begins as one number everywhere, by name."""

_CHOSEN = (*FORMS, "decoupled_weight_decay")
"""Options of groups that the class chooses, not the caller."""


@dataclass(frozen=True)
class Step:
    """A training step to capture, as the program `step`: forward, loss, backward, clipping and the optimizer.

    Attributes:
        optimizer: name of a class of `torch.optim`: sgd, adam, adamw, adagrad, rmsprop.
        options: its keyword arguments; all but `lr`, the first learning rate, are fixed in the program.
        groups: options of parameters whose names match one of some patterns, by these, with spaces between them:
            `{"*.bias *norm*": {"weight_decay": 0.0}}`. Each is a group of the optimizer, with a learning rate of its
            own; the first that matches counts.
        clip: clip gradients by their norm, to a `max_norm` that each step takes.
    """

    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    clip: bool = False

    def __post_init__(self) -> None:
        """Refuse what no optimizer is made of (`ModelFileInvalid`)."""
        if self.optimizer not in OPTIMIZERS:
            raise ModelFileInvalid(f"step: no optimizer `{self.optimizer}`; there are {', '.join(OPTIMIZERS)}")
        for options in (self.options, *self.groups.values()):
            self._check(options)
        self.made([torch.zeros(1)], self.options)

    def _check(self, options: Mapping[str, Any]) -> None:
        taken = [name for name in inspect.signature(self.kind).parameters if name not in ("params", *FORMS)]
        for name, value in options.items():
            if name not in taken:
                raise ModelFileInvalid(f"step: {self.optimizer} takes no `{name}`; it takes {', '.join(taken)}")
            if name == "dampening" and value:
                raise ModelFileInvalid("step: `dampening` counts from the second step on only, and a program is one")

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer."""
        return OPTIMIZERS[self.optimizer]

    def made(self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any], **forms: bool) -> Any:
        """Return an optimizer of parameters; `forms` are those that it shall have, beside the default ones."""
        known = inspect.signature(self.kind).parameters
        chosen = {name: forms.get(name, False) for name in FORMS if name in known}
        try:
            return self.kind(list(parameters), **{**options, **chosen})
        except (TypeError, ValueError) as error:
            raise ModelFileInvalid(f"step: {self.optimizer}: {error}") from error

    def options_shown(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of an optimizer with these, as torch has them in the groups of a new one."""
        group = self.made([torch.zeros(1)], options).param_groups[0]
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
    """Return the step of a text as `--step` takes it: `adamw`, `sgd:momentum=0.9,nesterov=True,clip=True`.

    `ModelFileInvalid`: it is none.
    """
    if isinstance(text, Step):
        return text
    name, _, rest = text.partition(":")
    try:
        call: Any = ast.parse(f"f({rest})", mode="eval").body
        options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if call.args or None in options:
            raise ValueError
    except (SyntaxError, ValueError):
        raise ModelFileInvalid(f"step: `{text}` is no optimizer with options, as `sgd:momentum=0.9`") from None
    clip = options.pop("clip", False)
    return Step(name, options, clip=bool(clip))


def step_in(manifest: Manifest) -> Step | None:
    """Return the step of a bundle, for the same parameters in another; None: it has none."""
    if OPTIMIZER not in manifest.extensions:
        return None
    found = optimizer_of(manifest)
    own = [{name: value for name, value in group.options.items() if name not in _CHOSEN} for group in found.groups]
    names = [" ".join(map(glob.escape, group.parameters)) for group in found.groups]
    return Step(found.optimizer.lower(), own[0], dict(zip(names[1:], own[1:], strict=True)), found.clip)
