"""Models of distributed tensors on a mesh of one process, exported, loaded and trained beside eager.

Run as `python -m tests.distributed_models DIRECTORY`: prints `done`, or fails.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotexport
import aotexport_runtime
from aotexport_runtime.values import meshes
from aotexport_runtime.values.subclasses import parts

meshes.join_alone()
MESH = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("model",))


def distributed(*shape, placement=None):
    return distribute_tensor(torch.randn(shape), MESH, [placement or Replicate()]).requires_grad_()


class Distributed(nn.Linear):
    """Parameters, argument, result and gradients are distributed."""

    def __init__(self):
        super().__init__(4, 3)
        self.weight = nn.Parameter(distributed(3, 4, placement=Shard(0)).detach())
        self.bias = nn.Parameter(distributed(3).detach())


class TensorParallel(nn.Module):
    """Plain outside: torch's own styles step in and out, and mask an embedding in parts."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(5, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        styles = {
            "table": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(self, MESH, styles)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.table(x))))


class Steps(nn.Module):
    """Every step, with gradients in placements of their own."""

    def forward(self, x, y):
        made = DTensor.from_local(x * 2, MESH, [Partial()], grad_placements=[Replicate()])
        whole = made.redistribute(placements=[Replicate()], forward_dtype=torch.float64).to_local()
        with torch.no_grad():
            constant = y.to_local()
        shard = y.redistribute(placements=[Shard(1)])
        return whole + constant, shard.sin(), y.full_tensor(), (shard * 2).to_local(grad_placements=[Shard(1)])


CASES = {
    "distributed": (Distributed, lambda: (distributed(2, 4),)),
    "tensor_parallel": (TensorParallel, lambda: (torch.tensor([[1, 2], [3, 0]]),)),
    "steps": (Steps, lambda: (torch.randn(2, 4, requires_grad=True), distributed(2, 4))),
}


def trained(module, args):
    """Return outputs and gradients of a call, with the placements of those that are distributed."""
    outputs = module(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    plain = [value.full_tensor() if isinstance(value, DTensor) else value for value in outputs]
    torch.stack([value.double().square().sum() for value in plain]).sum().backward()
    leaves = [arg for arg in args if arg.requires_grad]
    values = [*outputs, *(leaf.grad for leaf in (*leaves, *module.parameters()))]
    return [getattr(value, "placements", None) for value in values], [parts(value.detach()) for value in values]


def main(directory: Path) -> None:
    for name, (make, arguments) in CASES.items():
        torch.manual_seed(0)
        model, args = make(), arguments()
        verify = name == "distributed"
        aotexport.export(model, args, output=directory / name, programs=("train", "infer"), verify=verify)
        for target in ("portable", "autograd"):
            loaded = aotexport_runtime.load(directory / name, tensor_types=[DTensor], target=target).train()
            args = arguments()
            placements, expected = trained(copy.deepcopy(model).train(), args)
            for arg in args:
                arg.grad = None
            own, values = trained(loaded, args)
            assert own == placements, f"{name}: {target}"
            torch.testing.assert_close(values, expected, rtol=0, atol=0, msg=f"{name}: {target}")
    _check_refusals(directory / "distributed")


def distributes(x):
    return distribute_tensor(x, MESH, [Replicate()]).to_local() * 2


def _check_refusals(path: Path) -> None:
    with pytest.raises(
        aotexport.ExportFailed, match="in distributes: the model calls `distribute_tensor`, which sends"
    ):
        aotexport.export(distributes, (torch.ones(4),), output=path / "refused", verify=False)
    loaded = aotexport_runtime.load(path, tensor_types=[DTensor])
    try:
        loaded(distributed(2, 4, placement=Shard(0)))
    except aotexport_runtime.CallInvalid:
        print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
