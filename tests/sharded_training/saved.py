"""`save` of parameters in parts, beside `save` of the same whole.

Run as `python -m tests.sharded_training.saved DIRECTORY RANK WORLD_SIZE` once per rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

import aotexport_runtime
from tests.sharded_training.ranks import adamw, sharded, state_of, train


def main(path: Path, rank: int, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path.parent / 'store'}", rank=rank, world_size=ranks)
    module = sharded(aotexport_runtime.load(path).train(), "blocks")
    train(module, adamw(module), rank)
    aotexport_runtime.save(module, path.parent / "tuned")
    whole = aotexport_runtime.load(path).train()
    whole.load_state_dict(state_of(module))
    if rank == 0:
        aotexport_runtime.save(whole, path.parent / "expected")
    # Tuned bundles are not replaced unasked, which all ranks are told.
    try:
        aotexport_runtime.save(module, path.parent / "tuned")
    except aotexport_runtime.NotSupported as error:
        print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]))
