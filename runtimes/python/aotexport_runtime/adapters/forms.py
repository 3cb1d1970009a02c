"""Which form each adapter of a module has, and why."""

from __future__ import annotations

from dataclasses import dataclass

from aotexport_runtime.adapters.targets import Target


@dataclass(frozen=True)
class Report:
    """The adapters of a module.

    Attributes:
        targets: adapted weights, each with its form and the reason.
        trained: names of parameters that are trained whole.
        trainable: number of elements that are trained.
        total: number of elements of all parameters.
    """

    targets: tuple[Target, ...]
    trained: tuple[str, ...]
    trainable: int
    total: int

    def __str__(self) -> str:
        """Return a table."""
        width = max((len(target.name) for target in self.targets), default=0)
        rows = [f"{target.name:<{width}}  {target.form:<6}  {target.why}" for target in self.targets]
        rows += [f"{name:<{width}}  whole" for name in self.trained]
        return "\n".join([*rows, f"{self.trainable:,} of {self.total:,} elements are trained"])
