"""The forms that a bundle can ship."""

from __future__ import annotations

from collections.abc import Iterable

from aotexport.errors import ModelFileInvalid

TARGETS = {"portable": "operator calls of torch on any device; always included"}
"""Targets by name, with what they are."""


def check_targets(targets: Iterable[str]) -> None:
    """Refuse unknown targets.

    Raises:
        ModelFileInvalid: names the target and the known ones.
    """
    for target in targets:
        if target not in TARGETS:
            raise ModelFileInvalid(f"no target `{target}`; there are {', '.join(TARGETS)}")
