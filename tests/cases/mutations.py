"""Inputs, parameters and buffers that a call changes."""

import dataclasses
from typing import Any

import torch
from torch import nn

from tests.cases import DISAGREES, case, slow_case


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def non_leaf(*shape: int) -> torch.Tensor:
    return leaf(*shape) * 1


@slow_case(lambda: (non_leaf(3, 4), leaf(3, 4)), forward_only="gradients flow through")
def data_of_a_non_leaf_from_another_input(x, w):
    x.copy_(w * 2)
    return x.exp()


@case(lambda: (leaf(3, 4),))
def data_through_a_detached_alias(x):
    x.detach().mul_(2)
    return x * 3


@case(lambda: (torch.randn(2, 3),), members=lambda: {"weight": nn.Parameter(torch.randn(3, 3))})
def metadata_of_a_parameter(self, x):
    with torch.no_grad():
        self.weight.t_()
    return x @ self.weight


@slow_case(lambda: (torch.randn(3, 4),))
def data_and_metadata(x):
    x.t_()
    x.mul_(2)
    return x + 1


@case(lambda: (torch.randn(4, 4), leaf(4, 4)))
def metadata_before_a_gradient(x, w):
    x.t_()
    return x @ w


@slow_case(lambda: (torch.randn(4, 4), leaf(4, 4)))
def metadata_there_and_back(x, w):
    x.t_()
    x.t_()
    return x * w


@slow_case(
    lambda: (torch.randn(2, 3),), members=lambda: {"mean": torch.zeros(3), "weight": nn.Parameter(torch.randn(3))}
)
def buffer_replaced(self, x):
    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
    return (x - self.mean) * self.weight


@case(lambda: (torch.randn(2, 3),), forward_only="set_ on a graph input")
class ParameterDataAssigned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.5, 0.5)
        return x * self.weight


@slow_case(
    lambda: (leaf(2, 3),),
    members=lambda: {"last": torch.zeros(3), "before": torch.zeros(2, 3), "weight": nn.Parameter(torch.randn(3))},
)
def attributes_replaced_with_gradients(self, x):
    hidden = (x * self.weight + self.last.detach()).tanh()
    self.last, self.before = hidden[0], x.detach()
    return hidden.sum(), self.last * 2


@case(lambda: (torch.randn(3, 4), torch.randn(2, 3)), forward_only="set_ on a graph input")
def data_assigned_from_another_input(x, y):
    x.data = y
    return x * 2


@slow_case(lambda: (torch.randn(3, 4, 5),))
def normalised_channels_that_are_last(x):
    return nn.functional.batch_norm(x.mT, None, None, training=True)


@slow_case(lambda: (torch.randn(3, 4, 6),), forward_only=DISAGREES, verify="fast")
def pooled_channels_that_are_last(x):
    return nn.functional.max_pool1d(x.mT, 2), x.transpose(0, 1) // torch.tensor(0.3)


@case(lambda: (torch.randn(3, 4),), forward_only=DISAGREES, verify="fast")
def data_of_an_input_through_chunks_that_are_views_in_secret(x):
    first, _ = x.unsafe_chunk(2, -1)
    first.mul_(2)
    return x + 1


@case(lambda: (torch.randn(2, 3),), forward_only="shape or dtype of the module's tensors")
class BufferThatGrows(nn.Module):
    """Asks nothing about the buffer's size, so later calls do as the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(2, 3))
        self.queue = torch.zeros(0, 3)
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        self.queue = torch.cat([self.queue, x])[-3:]
        return x * self.weight + self.seen.sum(0) - self.queue.mean()


@case(lambda: (torch.randn(2, 3),), forward_only="shape or dtype of the module's tensors")
class EmptyBufferFilledByAnOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("doubled", torch.zeros(0, 3))

    def forward(self, x):
        torch.add(x, x, out=self.doubled)
        return x + 1


@case(lambda: (torch.randn(2, 3), torch.zeros(1, 3), torch.zeros(0)), forward_only="gives an input another shape")
def results_written_to_inputs_of_another_shape(x, y, z):
    torch.add(x, x, out=y)
    torch.cumsum(x, 0, out=z)
    return y + 1


@case(lambda: (leaf(3, 4), torch.randn(3, 4)))
def many_tensors_changed_at_once(x, y):
    scaled = x * 2
    torch._foreach_mul_([scaled, y], [y.clone(), 0.5 * y])
    torch._foreach_add_([y], [x.detach()], alpha=2)
    return scaled * y


@slow_case(lambda: (torch.randn(2, 4),), members=lambda: {"layer": nn.Linear(4, 3), "momentum": torch.zeros(3, 4)})
def own_optimizer(self, x):
    """Takes a step with momentum of its own weight, by operators on lists."""
    weight = self.layer.weight
    (gradient,) = torch.autograd.grad(self.layer(x).square().sum(), [weight])
    with torch.no_grad():
        torch._foreach_mul_([self.momentum], 0.9)
        torch._foreach_add_([self.momentum], [gradient])
        torch._foreach_add_([weight], [self.momentum], alpha=-0.1)
    return self.layer(x).detach()


@slow_case(lambda: (leaf(2, 3), {"labels": torch.randn(2, 3), "layers": [[torch.randn(2, 3)], None], "steps": 1}))
def containers_of_the_caller(x, cache):
    labels = cache.pop("labels")
    cache["layers"][0].append(x * 2)
    cache["layers"][1] = (x, cache["layers"][0][0])
    cache["steps"] += 1
    cache["view"] = labels.t()
    return x * labels


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    doubled: Any = None


@case(lambda: (Batch(leaf(2, 3)),))
def dataclass_of_the_caller(batch):
    batch.x, batch.doubled = batch.x * 2, [batch.x]
    return batch.x + 1


@case(lambda: (leaf(3, 4),))
def grad_mode_left_off(x):
    y = x * 2
    torch.set_grad_enabled(False)
    return y


class _Cache:
    """Holds a tensor as key-value caches of model libraries do: an object that is no module."""

    def __init__(self):
        self.keys = torch.zeros(8, 4)
        self.lengths = [torch.zeros((), dtype=torch.int64)]


@case(lambda: (torch.tensor([2]), torch.randn(1, 4)), forward_only="gradients flow through `buffer:keys`")
class CacheOfAPlainObjectThatIsABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(4, 4), _Cache()
        self.register_buffer("keys", self.cache.keys, persistent=False)

    def forward(self, index, x):
        self.cache.keys.index_copy_(0, index, self.linear(x))
        return self.keys.sum(0), self.cache.keys


@slow_case(lambda: (torch.tensor([2]), torch.randn(1, 4)), forward_only="gradients flow through `constant:constant.0`")
class CacheOfAPlainObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(4, 4), _Cache()

    def forward(self, index, x):
        self.cache.keys[index] = self.linear(x)
        self.cache.lengths[0].add_(1)
        return self.cache.keys.sum(0) * self.cache.lengths[0]


class _StoresInAList(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.linear, self.heads = nn.Linear(4, 4), heads

    def forward(self, x):
        self.heads[0] = self.linear(x)
        if len(self.heads) > 1:
            self.heads[1] = self.heads[1] + x.detach().sum()
        return self.heads[0].tanh()


@case(lambda: (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
class ListHeldByTwoModules(nn.Module):
    """Deep supervision: layers put their results into a list of the whole."""

    def __init__(self):
        super().__init__()
        self.heads = [torch.rand(1)]
        self.layer = _StoresInAList(self.heads)

    def forward(self, x):
        return torch.stack([self.layer(x), self.heads[0][:, :4]])


@case(lambda: (torch.randn(3, 4),))
class SumInAListHeldByTwoModules(ListHeldByTwoModules):
    def __init__(self):
        super().__init__()
        self.heads.append(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * self.heads[1]


_TOTAL = torch.zeros(4)


@slow_case(lambda: (leaf(3, 4),))
def write_to_a_global(x):
    with torch.no_grad():
        _TOTAL.add_(x.sum(0))
    return _TOTAL * x


@slow_case(lambda: (torch.randn(3, 4),))
class WriteToAClassAttribute(nn.Module):
    total = torch.zeros(4)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        self.total.copy_(y.detach().sum(0))
        return y + self.total
