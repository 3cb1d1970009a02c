"""Attributes of classes and modules, exchanged while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Set an attribute of a class or module for a while; one that it only inherits is shadowed."""
    own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
