"""Training on several processes; collectives, sharding and the files of checkpoints are `torch.distributed`'s."""

from aotexport_runtime.ranks.training import TrainingState, load, part

__all__ = ["TrainingState", "load", "part"]
