"""Trains a bundle by Ray Train: workers that share the weights, started anew from the last checkpoint if one dies.

    pip install 'ray[train]' aotexport-runtime[torch] scikit-learn
    PYTHONPATH=examples/finetune/deploy python examples/finetune/ray/train.py /shared/reader /shared/five /shared/run

Bundle, checkpoints and results are on storage that all machines reach; `cluster.yaml` starts a cluster.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch.distributed as dist
from ddp import EPOCHS, adamw, fit
from fsdp import parted
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import aotexport_runtime
from aotexport_runtime import ranks


def work(config: dict[str, Any]) -> None:
    """Train what is left of the epochs, on one worker; Ray has joined the workers to a process group."""
    network = parted(ranks.load(config["bundle"], matmul="torch", mapped=True).train())
    optimizer = adamw(network)
    state = ranks.TrainingState(network, optimizer)
    for epoch in range(state.resume(config["checkpoints"]), EPOCHS):
        loss = fit(network, optimizer, epoch)
        state.step = epoch + 1
        state.save(config["checkpoints"])
        ray.train.report({"epoch": epoch, "loss": loss, "workers": dist.get_world_size()})
    aotexport_runtime.save(network, config["tuned"], force=True)


def trainer(config: dict[str, Any], workers: int, storage: str) -> TorchTrainer:
    """Return the run: `config` has `bundle`, `tuned` and `checkpoints`; `storage` gets Ray's own records."""
    return TorchTrainer(
        work,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),  # On GPUs: "nccl", and ScalingConfig(use_gpu=True).
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", help="bundle of the untrained network")
    parser.add_argument("tuned", help="where to save the tuned bundle")
    parser.add_argument("run", help="directory of checkpoints and of Ray's records")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    config = {"bundle": chosen.bundle, "tuned": chosen.tuned, "checkpoints": f"{chosen.run}/checkpoints"}
    trainer(config, chosen.workers, f"{chosen.run}/ray").fit()
    print(f"{chosen.tuned}: tuned on {chosen.workers} workers")


if __name__ == "__main__":
    main()
