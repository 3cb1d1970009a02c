"""Memory of `save` of parameters in parts.

Run as `python -m tests.sharded_training.saved_memory DIRECTORY RANK WORLD_SIZE BUNDLE` once per rank: prints the bytes
of all weights, and by how many this process grew at most while it saved, without pages of files.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import aotexport
import aotexport_runtime

WIDTH, LAYERS = 1024, 96


class Deep(nn.Sequential):
    """400 MB of weights, in layers of 4 MB."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def export(path: Path) -> None:
    aotexport.export(Deep(), (torch.randn(2, WIDTH),), output=path, programs=("train",), verify=False)


def own_nbytes() -> int:
    """Return bytes of this process's memory that has no file behind it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Most:
    """Looks, in a thread of its own, how much memory this process has at most."""

    def __enter__(self) -> Most:
        self.nbytes = self.before = own_nbytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.nbytes = max(self.nbytes, own_nbytes())

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def main(path: Path, rank: int, ranks: int, bundle: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    module = aotexport_runtime.load(bundle, mapped=True).train()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for unit in (*module.children(), module):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    dist.barrier()
    with Most() as most:
        aotexport_runtime.save(module, path.parent / "tuned")
    print(sum(parameter.numel() * 4 for parameter in module.parameters()), most.nbytes - most.before)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
