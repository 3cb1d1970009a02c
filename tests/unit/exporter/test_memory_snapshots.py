"""Memory of a model, kept as copies and in files: what changed is told by bytes, and put back."""

from typing import Any

import pytest
import torch
from torch import nn

from aotexport.model.memory_snapshots import spans_of
from aotexport.model.state import State, collect_state
from aotexport.state.tensors import UNCHANGED, restored
from aotexport.write.weights import weights_as_snapshots, write_weights
from tests.cases.subclasses import two
from tests.models import module


def holder(*tensors: torch.Tensor) -> nn.Module:
    return module(**{f"b{index}": tensor for index, tensor in enumerate(tensors)})


def matrix() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


def large() -> torch.Tensor:
    """Return a little more than two of the parts that files are read in, of a size that no word divides."""
    return torch.arange((2 << 20) * 2 + 3, dtype=torch.int32).view(torch.uint8)[:-3].clone()


TENSORS = {
    "contiguous": lambda: [matrix()],
    "later_part_first": lambda: [(base := matrix())[1:], base[:2]],
    "transposed": lambda: [matrix().t()],
    "slices_of_one_storage": lambda: [*matrix().unbind()],
    "columns_of_one_storage": lambda: [*matrix().unbind(1)],
    "overlapping": lambda: [(flat := torch.arange(10.0))[:6], flat[4:]],
    "expanded": lambda: [torch.tensor([3.0]).expand(4)],
    "empty": lambda: [torch.empty(0, 3), matrix()],
    "scalar_of_a_byte": lambda: [torch.tensor(True)],
    "not_a_number": lambda: [torch.tensor([float("nan"), 1.0])],
    "float8": lambda: [torch.ones(3).to(torch.float8_e4m3fn)],
    "complex": lambda: [torch.tensor([1 + 2j, 3 - 1j])],
    "parts": lambda: [large()],
}


@pytest.fixture(params=["copies", "files"])
def keep(request, tmp_path):
    """Return what makes the state of a module keep its memory for the test."""

    def start(module: nn.Module) -> State:
        state = collect_state(module)
        if request.param == "files":
            request.node.snapshots = weights_as_snapshots(state, write_weights(state, tmp_path), tmp_path)
            request.node.snapshots.__enter__()
        return state

    yield start
    if request.param == "files":
        request.node.snapshots.__exit__(None, None, None)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy())


def write(tensor: torch.Tensor) -> None:
    """Change the last byte of a tensor's memory, which raises no version."""
    spans_of([tensor])[0][-1] ^= 1


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_memory_that_a_call_writes_is_put_back_to_the_bit(make, keep):
    model = holder(*make())
    state = keep(model)
    before = [(id(b), b.data_ptr(), b.shape, b.stride(), bits(b)) for b in model.buffers()]
    with restored(state):
        for buffer in model.buffers():
            if buffer.numel():
                write(buffer)
    assert [(id(b), b.data_ptr(), b.shape, b.stride(), bits(b)) for b in model.buffers()] == before


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_changes_of_a_call_that_writes_nothing_are_none(make, keep):
    model = holder(*make())
    with restored(keep(model)) as snapshot:
        assert snapshot.changes() == [UNCHANGED] * len(list(model.buffers()))


def test_changes_of_a_call_are_copies_of_what_is_there(keep):
    model: Any = holder(matrix(), matrix(), matrix(), matrix(), matrix())
    kept = model.b0
    with restored(keep(model)) as snapshot:
        model.b0.add_(1)
        model.b1 = matrix()
        model.b2 = None
        model.b3.data = torch.ones(2)
        found = snapshot.changes()
    assert torch.equal(found[0], matrix() + 1)
    assert found[0] is not kept
    assert found[1:3] == [UNCHANGED, None]
    assert torch.equal(found[3], torch.ones(2))
    assert found[4] == UNCHANGED
    assert model.b0 is kept
    assert all(torch.equal(buffer, matrix()) for buffer in model.buffers())


def test_changes_of_parts_of_a_tensor_are_changes_of_the_tensor():
    model: Any = holder(two(2), two(2))
    with restored(collect_state(model)) as snapshot:
        model.b0.b.add_(1)
        found = snapshot.changes()
    assert torch.equal(found[0].b, model.b0.b + 1)
    assert found[1] == UNCHANGED


def test_storage_that_a_call_frees_is_put_back(keep):
    model: Any = holder(matrix())
    state = keep(model)
    with restored(state):
        model.b0.untyped_storage().resize_(0)
    assert torch.equal(model.b0, matrix())


def test_gradients_and_requires_grad_are_put_back(keep):
    module = nn.Linear(2, 2)
    module.weight.grad = own = torch.ones(2, 2)
    with restored(keep(module)):
        assert module.weight.grad is None
        module(torch.ones(2)).sum().backward()
        module.bias.requires_grad_(False)
    assert (module.weight.grad is own, module.bias.grad, module.bias.requires_grad) == (True, None, True)
