"""Garbage is looked for among what an export makes, and what was there before is garbage again after it."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from aotexport.process.blocks import searched_for_new_garbage


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Nothing is frozen, as in the process of a user."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def dropped() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_old_objects_are_left_out_until_the_end(unfrozen: None) -> None:
    old = dropped()
    with searched_for_new_garbage():
        new = dropped()
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    gc.collect()
    assert old() is None
