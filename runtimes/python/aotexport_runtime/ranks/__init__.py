"""Training on several processes: bundles that all ranks agree on, and checkpoints that any number of ranks resumes.

Collectives, sharding and the files of checkpoints are those of `torch.distributed`.
"""

from aotexport_runtime.ranks.loading import load, part
from aotexport_runtime.ranks.training_state import TrainingState

__all__ = ["TrainingState", "load", "part"]
