"""The suites, one table of the output each. A new suite is a new file, and its line in `SUITES`."""

from benchmarks.suites.export import EXPORT
from benchmarks.suites.finetune import FINETUNE, STEP
from benchmarks.suites.generate import GENERATE
from benchmarks.suites.interface import Suite
from benchmarks.suites.load import LOAD
from benchmarks.suites.memory import MEMORY
from benchmarks.suites.scale import SCALE
from benchmarks.suites.serve import SERVE
from benchmarks.suites.size import SIZE
from benchmarks.suites.start import START
from benchmarks.suites.steps import INFER, OVERHEAD, TRAIN

_ALL = (OVERHEAD, START, MEMORY, LOAD, EXPORT, SCALE, TRAIN, INFER, FINETUNE, STEP, GENERATE, SIZE, SERVE)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}
"""Every suite, by name, in the order of a run: last are those of many models, of which a short run leaves some out."""

__all__ = ["SUITES", "Suite"]
