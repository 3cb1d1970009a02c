"""Libraries use the instructions of their level, and none that the exporting machine has beyond it."""

import pytest

from aotexport.torch_internals.compiler import vectors


@pytest.mark.parametrize(
    ("nbits", "flags"),
    [(256, {"-mavx2", "-mfma", "-mf16c"}), (512, {"-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"})],
)
def test_flags_for_the_compiler_are_those_of_the_level_at_every_export(nbits, flags):
    for _ in range(2):
        found = vectors(nbits)
        assert set(found.build_arch_flags().split()) == flags
        assert bool(found) == bool(vectors(nbits))
        assert set(found.build_arch_flags().split()) == flags
