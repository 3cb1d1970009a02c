"""Bundles trained by `DistributedDataParallel` in every variant, beside eager on the joined batch.

Run as `python -m tests.data_parallel DIRECTORY RANK WORLD_SIZE` once per rank: prints what was compared, or fails.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import SequenceClassifierOutput

import aotexport
import aotexport_runtime

STEPS, ROWS = 3, 4
"""Steps per run, and rows per rank and step."""

RESULTS: dict[str, Callable[..., Any]] = {"dict": dict, "model_output": SequenceClassifierOutput}


class Classifier(nn.Module):
    """Returns its loss and logits in a container of choice; has a parameter that no call uses."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.hidden(x)))
        return RESULTS[self.result](loss=nn.functional.cross_entropy(logits, labels), logits=logits)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        options: of `DistributedDataParallel`.
        accumulates: take two batches per step, the first without synchronisation.
        autocast: run calls in bfloat16.
        uneven: the last rank has a step less than the others, which `join` allows.
        uses_all: freeze the parameter that no call uses.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    accumulates: bool = False
    autocast: bool = False
    uneven: bool = False
    uses_all: bool = True


VARIANTS = {
    "default": Variant(),
    "static_graph": Variant({"static_graph": True}),
    "static_graph_unused": Variant({"static_graph": True}, uses_all=False),
    "find_unused_parameters": Variant({"find_unused_parameters": True}, uses_all=False),
    "gradient_as_bucket_view": Variant({"gradient_as_bucket_view": True}),
    "no_sync": Variant(accumulates=True),
    "mixed_precision": Variant(autocast=True),
    "join": Variant(uneven=True),
}


def make(result: str) -> Classifier:
    torch.manual_seed(0)
    return Classifier(result)


def export(directory: Path) -> None:
    """Export the model with every kind of result."""
    for result in RESULTS:
        args = (torch.randn(ROWS, 4), torch.arange(ROWS) % 3)
        aotexport.export(make(result), args, output=directory / result, programs=("train",), verify=False)


def batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(ROWS, 4, generator=draw), torch.randint(3, (ROWS,), generator=draw, dtype=torch.int64))
        for _ in range(count)
    ]


def loss_of(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], variant: Variant) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.autocast):
        result = module(*batch)
    return result["loss"] if isinstance(result, dict) else result.loss


def batches_of_step(rank: int, ranks: int, step: int, variant: Variant) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what a rank takes in a step; nothing where its data ended before."""
    each = 2 if variant.accumulates else 1
    steps = STEPS - 1 if variant.uneven and rank == ranks - 1 else STEPS
    return batches(rank, each * steps)[each * step : each * (step + 1)]


def train_parallel(module: nn.Module, variant: Variant, rank: int, ranks: int) -> None:
    parallel = DistributedDataParallel(module, **variant.options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    with parallel.join() if variant.uneven else contextlib.nullcontext():
        for step in range(STEPS):
            taken = batches_of_step(rank, ranks, step, variant)
            for index, batch in enumerate(taken):
                last = index == len(taken) - 1
                with contextlib.nullcontext() if last else parallel.no_sync():
                    loss_of(parallel, batch, variant).backward()
            if taken:
                optimizer.step()
                optimizer.zero_grad()


def train_joined(module: nn.Module, variant: Variant, ranks: int) -> None:
    """Train one process on what all ranks take; a rank whose data ended counts as one without gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        for rank in range(ranks):
            for batch in batches_of_step(rank, ranks, step, variant):
                (loss_of(module, batch, variant) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(directory: Path, rank: int, ranks: int) -> Iterator[str]:
    """Yield the name of each comparison that holds."""
    for result in RESULTS:
        for name, variant in VARIANTS.items():
            expected, loaded = make(result), aotexport_runtime.load(directory / result)
            for module in (expected, loaded):
                module.unused.requires_grad_(not variant.uses_all)
            train_joined(expected, variant, ranks)
            train_parallel(loaded, variant, rank, ranks)
            # In bfloat16 a sum over ranks is rounded elsewhere than one over rows.
            tolerance = {"rtol": 0.0, "atol": 1e-3 if variant.autocast else 1e-6}
            for key, value in expected.state_dict().items():
                torch.testing.assert_close(loaded.state_dict()[key], value, **tolerance, msg=f"{result} {name}: {key}")
            yield f"{result} {name}"


def main(directory: Path, rank: int, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=ranks)
    for compared in compare(directory, rank, ranks):
        print(compared)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]))
