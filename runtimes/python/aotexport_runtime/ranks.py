"""What ranks that train together need: one bundle, their parts of a batch, checkpoints for any number of ranks.

Collectives, sharding and the files of checkpoints are those of `torch.distributed`.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful

from aotexport_runtime.errors import AotExportError, ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.loading import load as load_alone

METADATA = ".metadata"
"""The file of a checkpoint that is written last, and in one step."""


def load(
    path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None, target: str = "auto", **options: Any
) -> BundleModule:
    """Load the bundle at `path` on every rank, and compare what was loaded.

    Args:
        path: directory of the bundle; may differ from rank to rank.
        group: the ranks, all of which call this; None: all of the job. Where no group was made, as in a script that
            runs without `torchrun`, this is `aotexport_runtime.load`.
        target: see `aotexport_runtime.load`, as for other options; not `onnx`, which does not train.
        options: other options.

    Raises:
        NotSupported: a rank could not load its bundle, or ranks loaded different ones; on every rank, with what each
            found.
    """
    if not dist.is_initialized():
        return load_alone(path, target=target, **options)
    module: BundleModule | None = None
    try:
        module = load_alone(path, target=target, **options)
        own = (module.bundle.manifest_sha256, "")
    except (AotExportError, OSError) as error:
        own = ("", f"{type(error).__name__}: {error}")
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group)
    if module is None or any(digest != found[0][0] for digest, _ in found):
        listed = "\n".join(
            f"  - rank {rank}: {error or f'bundle {digest[:16]}'}" for rank, (digest, error) in enumerate(found)
        )
        raise NotSupported(
            "ranks train one bundle together, and these loaded different ones (digests of `bundle.json`), or none. "
            f"Give every rank the same bundle:\n{listed}"
        )
    return module


def part(rows: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the rows that this rank takes of a batch of all ranks: as many as any other, in order of the ranks.

    The mean over ranks of the means over their rows is then the mean over the batch.

    Args:
        rows: the batch, the same on every rank; its first axis is parted into views.
        group: the ranks; None: all of the job, or this process where no group was made.

    Raises:
        ArgumentInvalid: the number of rows is no multiple of the number of ranks; on every rank.
    """
    if not dist.is_initialized():
        return rows
    count = dist.get_world_size(group)
    if len(rows) % count:
        fewer = len(rows) // count * count
        raise ArgumentInvalid(
            f"`rows`: {count} ranks do not divide {len(rows)} rows, and a mean over ranks would not be the mean over "
            f"rows. Take {fewer} or {fewer + count} rows, or another number of ranks"
        )
    return rows.chunk(count)[dist.get_rank(group)]


class TrainingState:
    """Weights, optimizer state, random numbers and position of a run; saved on some ranks, resumed on any number.

    Attributes:
        step: how many steps were made; counted by the caller, who takes the data of the next one by it.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, **others: Stateful) -> None:
        """Keep track of a run; nothing is copied.

        Args:
            module: a loaded bundle, parted by `fully_shard` or not, or a `DistributedDataParallel` of one.
            optimizer: over its parameters.
            others: further state of the run, by name.

        Raises:
            ArgumentInvalid: the module holds no loaded bundle.
            NotSupported: the optimizer keeps its state out of reach of other numbers of ranks.
        """
        bundles = [part.bundle for part in module.modules() if isinstance(part, BundleModule)]
        if not bundles:
            raise ArgumentInvalid(f"`module`: expected a loaded bundle, got {type(module).__name__}, which holds none")
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise NotSupported(
                "a `ZeroRedundancyOptimizer` keeps its state for one number of ranks alone. Give the module to "
                "`fully_shard`, which parts the state of any optimizer"
            )
        self.step = 0
        self.module, self.optimizer, self._others = module, optimizer, others
        self._digest = torch.tensor([*bytes.fromhex(bundles[0].manifest_sha256)], dtype=torch.uint8)
        self._group: Any = None
        self._writing: Future[Any] | None = None

    def save(self, directory: str | os.PathLike[str], *, background: bool = False) -> None:
        """Write a checkpoint of the current step to `directory`; every rank calls this.

        A checkpoint that is not whole is never resumed from. An earlier one is waited for first, and stays.

        Args:
            directory: of the checkpoints of the run.
            background: go on once the state is copied, and write while the run does; `wait` for it at the end.
        """
        self.wait()
        path = _path(Path(directory), self.step)
        state = self._state([f"random.{_rank()}"])
        if not (background and dist.is_initialized()):
            save(state, checkpoint_id=path)
            return
        # The run has collectives of its own meanwhile.
        self._group = self._group or dist.new_group(backend="gloo")
        saving: Any = async_save(state, checkpoint_id=path, process_group=self._group)  # pyrefly: ignore[bad-argument-type]
        self._writing = getattr(saving, "upload_completion", saving)

    def wait(self) -> None:
        """Return when the last checkpoint is written, or raise why it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def resume(self, directory: str | os.PathLike[str]) -> int:
        """Take on the newest checkpoint of `directory`, if there is one; every rank calls this.

        Random numbers go on as they would have, on ranks that were there; others begin anew.

        Returns:
            The number of steps that were made; 0: there is no checkpoint.

        Raises:
            NotSupported: it is a checkpoint of another bundle, or of something else; on every rank.
        """
        newest = [_newest(Path(directory)) if _rank() == 0 else 0]
        if dist.is_initialized():
            dist.broadcast_object_list(newest, src=0)
        if not newest[0]:
            return 0
        path = _path(Path(directory), newest[0])
        known = FileSystemReader(path).read_metadata().state_dict_metadata
        self._check(path, known)
        state = self._state([name for name in (f"random.{_rank()}",) if name in known])
        state_dict_loader.load(state, checkpoint_id=path)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.module, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for name, other in self._others.items():
            other.load_state_dict(state["others"][name])
        if (random := state.get(f"random.{_rank()}")) is not None:
            torch.set_rng_state(random)
        self.step = int(state["step"])
        return self.step

    def _check(self, path: Path, known: dict[str, Any]) -> None:
        own = torch.zeros_like(self._digest)
        if "bundle" in known:
            state_dict_loader.load({"bundle": own}, checkpoint_id=path)
        if not torch.equal(own, self._digest):
            expected, got = (bytes(digest.tolist()).hex()[:16] for digest in (self._digest, own))
            raise NotSupported(
                f"`{path}` is a checkpoint of another bundle: expected {expected}, got "
                f"{got if 'bundle' in known else 'none'} (digests of `bundle.json`). Load the bundle that the run "
                "began with, or give the run another directory"
            )

    def _state(self, random: list[str]) -> dict[str, Any]:
        """Return what a checkpoint holds; tensors are those of the run."""
        model, optimizer = get_state_dict(self.module, self.optimizer)
        others = {name: other.state_dict() for name, other in self._others.items()}
        state = {"model": model, "optimizer": optimizer, "bundle": self._digest, "step": torch.tensor(self.step)}
        return state | ({"others": others} if others else {}) | {name: torch.get_rng_state() for name in random}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _newest(directory: Path) -> int:
    """Return the step of the newest whole checkpoint; 0: there is none."""
    whole = (path.parent.name for path in directory.glob(f"step-*/{METADATA}"))
    return max((int(name.removeprefix("step-")) for name in whole), default=0)
