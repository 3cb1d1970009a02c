"""Attributes of classes and modules, exchanged while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Set an attribute of a class or module, or the code of a function, for a while; inherited ones are shadowed."""
    is_code = name == "__code__"
    own = is_code or name in vars(owner)
    original = owner.__code__ if is_code else vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
