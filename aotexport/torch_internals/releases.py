"""What differs between the releases of torch that the exporter runs with; nothing else asks for torch's version."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Release:
    """A release of torch.

    Attributes:
        asynchronous_inputs: field of `ViewAndMutationMeta` that lists inputs of asynchronous collectives.
        derived_fields: fields of `ViewAndMutationMeta` that torch 2.13 has not, and that follow from others.
    """

    asynchronous_inputs: str = "act_input_indices"
    derived_fields: frozenset[str] = frozenset()


RELEASES = {
    "2.13": Release(),
    "2.14": Release(),
    "2.15": Release("act_input_paths", frozenset({"saved_tensor_is_graph_input"})),
}
"""Per release, what differs in it."""


def release_of(version: str) -> str:
    """Return major and minor version of a version of torch: `2.13` of `2.13.0+cpu`."""
    return ".".join(version.split(".")[:2])


def is_tested() -> bool:
    """Return whether the running torch is a release that the exporter is tested with."""
    return release_of(torch.__version__) in RELEASES


def release() -> Release:
    """Return the facts of the running torch; of one that is not known, those of the newest release."""
    return RELEASES.get(release_of(torch.__version__), RELEASES[max(RELEASES, key=_as_numbers)])


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
