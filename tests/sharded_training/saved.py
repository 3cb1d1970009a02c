"""`save` of parameters in parts, beside `save` of the same whole.

Run as `python -m tests.sharded_training.saved DIRECTORY RANK WORLD_SIZE` once per rank.
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

import aotexport_runtime
from aotexport_runtime import adapters
from tests.sharded_training.ranks import adamw, sharded, state_of, train, with_adapters


def save_adapters(path: Path, rank: int) -> None:
    """Save an adapter in parts, and the bundle with it merged; each beside that of the same whole."""
    module = sharded(with_adapters(aotexport_runtime.load(path).train()), "blocks")
    train(module, adamw(module), rank)
    adapters.save_adapter(module, path.parent / "adapter")
    whole = with_adapters(aotexport_runtime.load(path).train())
    whole.load_state_dict(state_of(module))
    adapters.merge_adapter(module)
    aotexport_runtime.save(module, path.parent / "merged")
    if rank == 0:
        adapters.save_adapter(whole, path.parent / "expected_adapter")
        adapters.merge_adapter(whole)
        aotexport_runtime.save(whole, path.parent / "expected_merged")


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
    except (aotexport_runtime.NotSupported, aotexport_runtime.OutputExists) as error:
        print(error)
    save_adapters(path, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]))
