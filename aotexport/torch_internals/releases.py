"""What differs between the releases of torch that the exporter runs with; nothing else asks for torch's version."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aotexport.errors import ExportFailed


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release of torch.

    Attributes:
        asynchronous_inputs: field of `ViewAndMutationMeta` that lists inputs of asynchronous collectives.
        checkpoint_generator: function of `torch.utils.checkpoint` around a checkpoint without reentrance.
    """

    asynchronous_inputs: str
    checkpoint_generator: str


_FROM_2_14 = Release(
    asynchronous_inputs="act_input_paths", checkpoint_generator="_checkpoint_without_reentrant_generator_impl"
)

RELEASES = {
    "2.13": Release(
        asynchronous_inputs="act_input_indices", checkpoint_generator="_checkpoint_without_reentrant_generator"
    ),
    "2.14": _FROM_2_14,
    "2.15": _FROM_2_14,
}
"""The releases that the tests pass with, oldest first."""


def _known() -> Release | None:
    return RELEASES.get(".".join(torch.__version__.split(".")[:2]))


def is_tested() -> bool:
    """Return whether the tests were run with the installed torch's release."""
    return _known() is not None


def check_release() -> None:
    """Refuse a torch that the tests were not run with; name the releases, and the option that tries another one."""
    if not is_tested():
        raise unfit_release("or try this one with --allow-untested-torch (allow_untested_torch=True)")


def unfit_release(otherwise: str) -> ExportFailed:
    """Return the error for a torch that the tests were not run with; `otherwise` continues the advice."""
    oldest, *_, newest = RELEASES
    return ExportFailed(
        f"torch {torch.__version__} is installed, and aotexport is tested with {oldest} to {newest}: install one of "
        f"these, {otherwise}"
    )


def release() -> Release:
    """Return the row of the running torch; that of the newest release, if the running one is not known."""
    return _known() or list(RELEASES.values())[-1]
