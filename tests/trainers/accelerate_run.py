"""A model and its bundle trained by accelerate: two processes, gradients of two batches per step, bfloat16.

Run as `python -m tests.trainers.accelerate_run BUNDLE DIRECTORY RANK` once per rank: prints what was compared, or
fails.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from aotexport_runtime import load
from tests.trainers.digits import Text, make_reader

RANKS = 2


def batches() -> DataLoader[Any]:
    columns = [{name: row[name] for name in ("input_ids", "labels")} for row in map(Text(0, 64).__getitem__, range(64))]
    return DataLoader(columns, batch_size=8, shuffle=True)  # type: ignore[arg-type]


class Run:
    """What accelerate prepared of a model, with an optimizer and a schedule."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        set_seed(0)
        self.accelerator, self.losses = accelerator, []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
        self.model, self.optimizer, self.schedule, self.batches = accelerator.prepare(
            model, optimizer, schedule, batches()
        )

    def epoch(self) -> None:
        set_seed(1, device_specific=True)
        self.model.train()
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch)["loss"]
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(self.accelerator.gather(loss.detach()).mean().item())

    @torch.no_grad()
    def predictions(self) -> torch.Tensor:
        self.model.eval()
        logits = [self.model(**batch)["logits"] for batch in self.batches]
        return self.accelerator.gather_for_metrics(torch.cat(logits))

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.clone() for name, value in state.items()}


def trained(accelerator: Accelerator, model: torch.nn.Module, directory: Path) -> dict[str, Any]:
    """Train an epoch, keep the state, train another, go back and train it again; return what came of it."""
    run = Run(accelerator, model)
    run.epoch()
    found: dict[str, Any] = {"after one": run.weights(), "predictions": run.predictions()}
    accelerator.save_state(str(directory / "state"))
    run.epoch()
    found["after two"] = run.weights()
    accelerator.load_state(str(directory / "state"))
    found["restored"] = run.weights()
    run.epoch()
    found |= {"again": run.weights(), "losses": run.losses}
    accelerator.save_model(run.model, str(directory / "saved"))
    accelerator.free_memory()
    return found


def main(bundle: Path, directory: Path, rank: int) -> None:
    # As a launcher sets them; the group meets in a file, since a port may be taken.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=RANKS)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert (accelerator.num_processes, accelerator.process_index) == (RANKS, rank)

    expected = trained(accelerator, make_reader(), directory / "model")
    found = trained(accelerator, load(bundle), directory / "bundle")

    assert len(found["losses"]) == 12
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
        print(name)
    make_reader().from_pretrained(directory / "bundle/saved", config=make_reader().config)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
