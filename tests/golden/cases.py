"""What goldens are exported from: those of the current format, and those that golden calls call in eager mode.

Each case is a function that is exported, or one without arguments that returns a `Case`; its name is the name of the
golden, its docstring says what it is there for. Other goldens of released formats are never written again.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.testing._internal.two_tensor import TwoTensor

import aotexport
from tests.models import Tiny
from tests.scaled import Block, Recipe, Rounding, ScaledInt8


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one export.

    Attributes:
        model: a module or function.
        args: positional example inputs.
        kwargs: keyword example inputs.
        programs: see `aotexport.export`.
        dynamic_shapes: see `aotexport.export`.
        autocast: the dtype of autocast around the export; None: it is off.
    """

    model: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    programs: tuple[str | aotexport.Program, ...] = ("train",)
    dynamic_shapes: Any = None
    autocast: str | None = None


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Register what returns a case."""
    CASES[function.__name__] = function
    return function


def call(
    make_args: Callable[[], tuple[Any, ...]], *, kwargs: Callable[[], dict[str, Any]] = dict, **options: Any
) -> Any:
    """Register a function of tensors as a case, by what returns fresh arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = lambda: Case(function, make_args(), kwargs(), **options)
        return function

    return register


class Built(nn.Module):
    """A module with given state, whose forward is a function of it and of the inputs."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self._function = function
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    """Return a parameter of generic values."""
    return nn.Parameter(ramp(*shape))


def ramp(*shape: int) -> Tensor:
    """Return a tensor of generic values: cosines of its element numbers."""
    count = 1
    for size in shape:
        count *= size
    return torch.cos(torch.arange(count, dtype=torch.float32) * 0.7 + 0.1).reshape(shape)


def needs_grad(*shape: int) -> Tensor:
    """Return a leaf that requires grad."""
    return ramp(*shape).requires_grad_(True)


def non_leaf(*shape: int) -> Tensor:
    """Return a tensor that requires grad and is no leaf."""
    return needs_grad(*shape).clone()


# --- state ------------------------------------------------------------------------------------------------


@case
def tiny() -> Case:
    """A little of everything, which most bundles of `refused` begin at."""
    x, batch = torch.linspace(-1, 1, 20).reshape(5, 4), torch.export.Dim("batch", min=2, max=64)
    return Case(Tiny(), (x,), dynamic_shapes=({0: batch},))


@case
def linear() -> Case:
    """A module with parameters, in both default programs."""
    return Case(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (ramp(4, 3),), programs=("train", "infer"))


@case
def tied_weights() -> Case:
    """One parameter under two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    return Case(Tied(), (torch.tensor([0, 3, 3]),))


@case
def normalisation() -> Case:
    """Buffers whose values change, dropout, and a counter of integers."""
    return Case(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)), (ramp(4, 3),), programs=("train", "infer"))


@case
def rebound_buffer() -> Case:
    """A buffer that the call replaces by a new tensor."""

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x
            return self.total * 2

    return Case(Total(), (needs_grad(3),))


# --- outputs ----------------------------------------------------------------------------------------------


@call(lambda: (ramp(4, 2),), programs=("infer",))
def more_views_of_input(x: Tensor) -> tuple[Tensor, ...]:
    """Views of an input that change its dtype or cut it in several."""
    first, second = x.split(2)
    return torch.view_as_complex(x), x.view(torch.int32), first, second, *x.unbind(), x.view_as(x)


@call(lambda: (needs_grad(2, 3),))
def view_under_no_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view of an input that was made where gradients are off."""
    with torch.no_grad():
        y = x.view(-1)
    return y, x * 2


@call(lambda: (needs_grad(2, 3), needs_grad(2, 3)))
def view_under_no_grad_of_intermediate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A view that was made where gradients are off, of a value that the caller does not get."""
    product = x * y
    with torch.no_grad():
        hidden = product.view(-1)
    return hidden, x * 3


@call(lambda: (needs_grad(4), needs_grad(4)))
def detached_item_of_input(x: Tensor, y: Tensor) -> Any:
    """One of several views of an input, detached."""
    return (x.split(2)[0].detach(), x * y)


@call(lambda: (needs_grad(3) * 1, needs_grad(3) * 1, needs_grad(3)))
def inputs_changed_under_no_grad(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs that are changed where gradients are off; no gradient comes to the one that is not returned."""
    with torch.no_grad():
        x.mul_(2)
        y.mul_(3)
    return x, (x.detach() + y.detach()).sum() * weight


@call(lambda: (needs_grad(6),))
def strided_view_of_input(x: Tensor) -> Any:
    """A view of an input that has no recorded steps."""
    return (x.as_strided((2, 2), (1, 2), 1), x * 2)


@call(lambda: (torch.linspace(-1, 1, 6).reshape(2, 3), needs_grad(2, 3)))
def python_that_reads_tensors(x: Tensor, y: Tensor) -> Tensor:
    """Python code that branches on strides, on what requires grad, and on whether gradients are enabled."""
    return x * y if x.is_contiguous() and y.requires_grad and torch.is_grad_enabled() else x + y


@call(lambda: (needs_grad(2, 3),))
def view_of_output(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view of another output."""
    y = x * 2
    return y, y.view(-1)


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad.view(2, 3)


@call(lambda: (needs_grad(2, 3),))
def custom_function_view(x: Tensor) -> Any:
    """A view that a custom autograd function made."""
    return _Flat.apply(x)


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.twice = x * 2
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.twice


@call(lambda: (needs_grad(3),))
def custom_autograd_function(x: Tensor) -> Any:
    """A backward of the user's own."""
    return _Sine.apply(x)


@call(lambda: (needs_grad(3), ramp(3)))
def tensor_hook(x: Tensor, w: Tensor) -> Tensor:
    """A hook of the model's own, which takes a tensor of the graph."""
    hidden = x * 2
    hidden.register_hook(lambda grad: grad * w)
    return hidden.sin()


class _Strided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.stride(0)


@call(lambda: (needs_grad(3),))
def custom_function_by_the_joint_graph(x: Tensor) -> Any:
    """A backward that no node holds: the forward graph is not differentiable."""
    return _Strided.apply(x)


@call(lambda: (needs_grad(3), non_leaf(3)))
def outputs_without_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, None, int, Tensor]:
    """Outputs that are integers, detached or nothing, and an input whose gradient is never defined."""
    return x * 2, x.argmax(), None, 7, y.detach() + 1


@call(lambda: (needs_grad(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2, max=9)}})
def size_output(x: Tensor) -> Any:
    """An output that is a dynamic size."""
    return (x * 2, x.shape[0], x.shape[0] // 2)


@call(lambda: (needs_grad(3, 2), 3), dynamic_shapes={"x": None, "n": torch.export.Dim.DYNAMIC})
def dynamic_integer(x: Tensor, n: Any) -> Any:
    """An integer of the call, returned and saved for backward."""
    return (x * n, n, x[:, :1] - n)


# --- mutations --------------------------------------------------------------------------------------------


@call(lambda: (ramp(3), ramp(3), needs_grad(3), non_leaf(3)))
def input_data_mutated(x: Tensor, y: Tensor, w: Tensor, z: Tensor) -> Tensor:
    """Inputs that are written to: twice, through `.data`, and, a leaf and another, where gradients are off."""
    x.mul_(2).add_(1)
    y.data.add_(x)
    with torch.no_grad():
        w.mul_(3)
        z.mul_(3)
    return x * w + z


@call(lambda: (ramp(2, 3),), programs=("infer",))
def input_metadata_mutated(x: Tensor) -> Tensor:
    """An input that is transposed in place."""
    x.t_()
    return x * 2


@call(lambda: (needs_grad(2, 3), needs_grad(3)))
def leaf_transposed_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    """A leaf that requires grad, and is transposed in place where gradients are off."""
    with torch.no_grad():
        x.t_()
    return y * 3


@call(lambda: (ramp(2, 3), needs_grad(3, 2)))
def input_data_and_metadata_mutated(x: Tensor, w: Tensor) -> Tensor:
    """An input that is transposed in place and written to."""
    x.t_()
    x.mul_(2)
    return w + x


@call(lambda: (ramp(2, 3), ramp(2, 3) * 2), programs=("infer",))
def input_storage_replaced(x: Tensor, y: Tensor) -> Tensor:
    """An input that gets another's storage."""
    x.set_(y)
    return x * 2


@call(lambda: (ramp(2, 3), ramp(2, 3) * 2), programs=("infer",))
def input_data_replaced(x: Tensor, y: Tensor) -> Tensor:
    """An input whose `.data` is another's."""
    x.data = y
    return x * 2


@call(lambda: (needs_grad(4, 3),))
def several_views_of_input(x: Tensor) -> tuple[Tensor, ...]:
    """Views of an input that one operator made, which nobody may change in place."""
    return x.split(2)


@call(lambda: (ramp(2, 3), needs_grad(6)))
def view_of_mutated_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A view of an input that is written to afterwards."""
    y = x.view(-1)
    x.mul_(2)
    return y, y * w


# --- calls ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple."""

    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Box:
    """A dataclass."""

    tensor: Tensor
    note: str


@dataclasses.dataclass
class Result(collections.OrderedDict):  # type: ignore[type-arg]
    """A model output, as model libraries make them: a dataclass that is a mapping without its empty fields."""

    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


@call(lambda: ({"x": needs_grad(3), "scale": ramp(3)},), kwargs=lambda: {"shift": ramp(3), "by": 1 + ramp(3)})
def dict_read_by_key(batch: dict[str, Tensor], **more: Tensor) -> Tensor:
    """A dict and keywords whose keys may come in any order."""
    return batch["x"] * batch["scale"] + more["shift"] / more["by"]


@case
def nested_inputs() -> Case:
    """Every kind of container among the inputs, and constants of every type."""

    def call(
        x: Tensor,
        /,
        pair: Pair,
        box: Box,
        size: torch.Size,
        *rest: Any,
        flags: dict[Any, Any],
        mode: str = "sum",
        **more: Any,
    ) -> Tensor:
        total = x + pair.left * pair.right + box.tensor.reshape(size).sum()
        for item in (*rest[0], *flags.values(), *more.values()):
            total = total + item if isinstance(item, Tensor) else total
        return total

    x = needs_grad(3)
    numbers = [None, True, 3, 0.5, -0.0, float("inf"), float("nan"), 2 - 1j, complex(float("-inf"), 0)]
    layouts = ["strided"]
    formats = ["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"]
    names = [getattr(torch, name) for name in ("float16", *layouts, *formats)]
    constants = [*numbers, "text", torch.device("cpu"), slice(None), slice(1, 5, 2), *names]
    sets = [{"b", "a", 1}, frozenset()]
    args = (x, Pair(ramp(3), x), Box(ramp(4), "note"), torch.Size([2, 2]), (ramp(3), constants, sets))
    flags = collections.OrderedDict({"a": ramp(3), 1: 2, None: "none", False: ramp(3), ("user", 1, None, True): 4})
    return Case(call, args, {"flags": flags, "extra": {"deep": 1.5}, "again": ramp(3)})


class Settings:
    """An object with attributes."""

    def __init__(self, scale: float, shift: Tensor) -> None:
        self.scale, self.shift = scale, shift


class Items(list[Any]):
    """A list of a class of its own."""


@call(lambda: (ramp(3).numpy(), ramp(3)), programs=("infer",))
def numpy_arrays(x: Any, scale: Tensor) -> Any:
    """Arrays of NumPy, taken, changed and returned."""
    x += 1
    return x, (torch.from_numpy(x) * scale).numpy()


@case
def python_containers() -> Case:
    """Objects and containers of Python's library, among inputs and outputs; the call changes them."""

    def call(x: Tensor, kept: Any, settings: Settings, seen: set[int]) -> Any:
        kept.append(x)
        seen.add(len(seen))
        settings.shift = settings.shift * 2
        factories = (None, list, dict, set, tuple, int, float, str, bool)
        made = [collections.defaultdict(factory) for factory in factories]
        return made, collections.Counter("aab"), collections.deque([x + kept[0]]), Settings(2.0, x.cos())

    kept = collections.deque([ramp(3), ramp(3)], 2)
    return Case(call, (ramp(3), kept, Settings(1.5, ramp(3)), {4}), programs=("infer",))


@case
def changed_containers() -> Case:
    """A list, a dict and a dataclass of the caller that the call changes; some of what is in them stays."""

    def call(x: Tensor, items: list[Any], table: dict[Any, Any], box: Box) -> Tensor:
        items.append(x * 2)
        table["sum"] = [x + table.pop("old"), 3]
        table[True] = table[None] = table["user", 0, None, False] = 2.5
        table[0.5] = table[b"bytes"] = table[1.5, b""] = 1
        box.tensor = table["sum"][0]
        return x.sin()

    table = {"old": ramp(3), "kept": ramp(2), -0.5: 1, b"\x00": 2, (0.25, b"in"): 3}
    return Case(call, (needs_grad(3), Items([ramp(3)]), table, Box(ramp(3), "note")))


@call(lambda: (ramp(2, 3),), programs=("infer",))
def nested_outputs(x: Tensor) -> dict[str, Any]:
    """Every kind of container among the outputs."""
    return {
        "list": [x + 1, (x + 2,)],
        "pair": Pair(x + 3, x + 4),
        "box": Box(x + 5, "note"),
        "max": torch.max(x, dim=0),
        "ordered": collections.OrderedDict(first=x + 6),
        "result": Result(hidden=(x + 7,)),
        "size": x.shape,
        "constants": (None, 2.5, "text", float("-inf"), complex(float("inf"), float("nan"))),
    }


@case
def same_tensor_twice() -> Case:
    """One tensor passed as two arguments."""
    x = needs_grad(3)
    return Case(lambda a, b: a * b.sin(), (x, x))


@case
def argument_is_parameter() -> Case:
    """A parameter of the module passed as an argument."""
    module = Built(lambda self, x, w: x * self.w + w, w=weight(3))
    return Case(module, (ramp(3), module.w))


# --- sizes ------------------------------------------------------------------------------------------------


@case
def dynamic_sizes() -> Case:
    """Sizes that follow from each other, with guards and gradients in a memory format."""

    def call(x: Tensor, y: Tensor) -> Tensor:
        rows, columns = x.shape
        total = torch.cat([x, y]) + rows // 2 + (columns + 1) % 3
        if columns >= 3 and rows != columns and rows * columns < 1000:
            total = total * 2
        return total.reshape(-1)

    batch, width = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("width", min=1)
    shapes = {"x": {0: batch, 1: width}, "y": {0: 2 * batch + 1, 1: width}}
    return Case(call, (needs_grad(4, 5), needs_grad(9, 5)), dynamic_shapes=shapes)


# --- nodes ------------------------------------------------------------------------------------------------


@call(lambda: (ramp(3), ramp(3)), kwargs=lambda: {"steps": 2}, programs=("infer",))
def passed_defaults(x: Tensor, scale: Tensor | None = None, *, steps: int = 4, bias: float = 1.0) -> Tensor:
    """Parameters with a default for which the example passes something else, and one that it leaves out."""
    return x * scale * steps + bias if scale is not None else x


@call(lambda: (needs_grad(2, 2),))
def regions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Regions without gradients and of autocast, in the forward graph."""
    with torch.no_grad():
        scale = x.sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x.t()
    return product * scale, x * scale


@call(lambda: (needs_grad(2, 2),))
def branches(x: Tensor) -> Any:
    """A branch on data, with gradients."""
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))


@call(lambda: (needs_grad(3),))
def grad_mode_left_off(x: Tensor) -> Tensor:
    """A call that leaves gradients switched off."""
    y = x * 2
    torch.set_grad_enabled(False)
    return y


TYPES = (Block, Recipe, Rounding, ScaledInt8, TwoTensor)
"""The classes that readers of the goldens are given."""


@call(lambda: (needs_grad(2), needs_grad(2)))
def gradients_taken_inside(x: Tensor, y: Tensor) -> Any:
    """A program that fixes which arguments are one tensor."""
    return torch.autograd.grad((x * y).sum(), [x, y], create_graph=True)


@call(lambda: (needs_grad(2), needs_grad(2)))
def backward_passes_that_repeat(x: Tensor, y: Tensor) -> Any:
    """A program whose backward reads nothing of its forward."""
    return x + y


@call(lambda: (needs_grad(2), needs_grad(2), needs_grad(2)))
def results_that_rely_on_different_inputs(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Backward passes that check what the caller may have changed: an input for one output, an output for another."""
    first = x * 2
    return first, first * y + z * z


@call(lambda: (needs_grad(3, 3),), autocast="bfloat16")
def captured_under_autocast(x: Tensor) -> Tensor:
    """An export under autocast, of code that asks for dtypes."""
    scores = x @ x
    return torch.softmax(scores.float(), -1).to(scores.dtype)


@case
def checkpoint() -> Case:
    """A part whose backward computes anew what it needs, with a random number that is drawn once."""

    def part(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x @ w).sin(), 0.5).exp()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(part, x, w, use_reentrant=False) * 2

    return Case(call, (needs_grad(2, 2), needs_grad(2, 2)))


class Cancelling(nn.Module):
    """Loses the last digits in eager mode, where its trace has all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x if torch.compiler.is_compiling() else (x + 16384) - 16384) * self.weight


# --- rules that only some calls show ----------------------------------------------------------------------


@call(lambda: (needs_grad(2, 2),))
def tables_of_branches(x: Tensor) -> Tensor:
    """A branch whose bodies have tables of their own, of other metadata and operators than the graph around them."""
    return torch.cond(x.sum() > 0, lambda x: x.sin() * x[0], lambda x: x.cos().exp(), (x,)).relu()


@call(lambda: (needs_grad(2), needs_grad(2)))
def rows_that_use_some_operands(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A scan and a map, whose results and operands all get gradients, and a carried value that begins without."""
    total, products = scan(lambda c, t: (c * x + y * 0, c * t), torch.ones(2), torch.ones(3, 2), dim=0)
    rows, others = map_over(lambda t, x, y: (t * x, t + 1), torch.ones(3, 2), x, y)
    return total.detach(), products, rows, others


@call(lambda: (needs_grad(2), needs_grad(2), needs_grad(2)))
def loop_without_a_step(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """A loop that ends at once, with the gradients of one step, and operands that it does not use."""
    start = (torch.tensor(3), x, y)
    return while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, a * z, b.detach() + 0), start)


@call(lambda: (non_leaf(2, 3),))
def view_of_returned_view(x: Tensor) -> tuple[Tensor, ...]:
    """Views of an input, and of an intermediate, each with a view of it that is returned as well."""
    flat, turned = x.view(-1), x.sin().t()
    return flat, flat[1:4], turned, turned[0]


@case
def generated_arguments() -> Case:
    """An argument that is large enough for recorded calls to make its floats instead of storing them."""
    return Case(Built(lambda self, x: (x * self.w).sum(0), w=weight(4)), (ramp(1024, 4),), programs=("infer",))


@call(lambda: (needs_grad(3),))
def code_that_reads_is_leaf(x: Tensor) -> Any:
    """A branch on whether an argument is a leaf."""
    return x * (2 if x.is_leaf else 3)


@call(lambda: (ramp(3), needs_grad(3)))
def code_that_asks_for_gradients(x: Tensor, y: Tensor) -> Tensor:
    """A branch on whether an argument requires grad, and a re-entrant checkpoint of one that does not."""
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True) * (y * 2 if y.requires_grad else y)


@call(lambda: (needs_grad(2, 2),))
def bodies_that_draw(x: Tensor) -> tuple[Tensor, Tensor]:
    """A branch and a map that draw random numbers; backward draws others, and differentiates those."""
    branch = torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x.cos(), (x,))
    return branch, map_over(lambda row: row * torch.rand_like(row), x)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        sign = y.sign()
        ctx.save_for_backward(y)
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(sign)
        return x.mul_(2), y * 3, sign

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, x: Tensor | None, y: Tensor | None, sign: Tensor | None) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        return None if x is None else x * 2 * saved.cos(), None if y is None else y * 3


@call(lambda: (non_leaf(3), needs_grad(3)))
def custom_function_that_writes(x: Tensor, y: Tensor) -> Any:
    """A custom function that writes to an operand, has an output without gradient, and takes undefined gradients."""
    return _Doubled.apply(x, y)


@case
def checkpoint_that_reads_state() -> Case:
    """A part whose backward reads what a buffer holds by then, and draws other random numbers than the call."""

    def forward(self: Any, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout((x * self.scale).sin(), 0.5).exp()

        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False, preserve_rng_state=False) * 2

    return Case(Built(forward, scale=ramp(2)), (needs_grad(3, 2),))


@call(lambda: (ramp(3, 2), torch.polar(ramp(3), ramp(3))), programs=("infer",))
def parts_of_views_of_other_dtypes(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """Views of inputs in another dtype that have no recorded steps."""
    return torch.view_as_complex(x).unbind()[1], x.view(torch.int32).unbind()[1], torch.view_as_real(z).unbind(1)[1]


@call(lambda: (needs_grad(6), needs_grad(3)))
def results_that_are_laid_out(x: Tensor, y: Tensor) -> Any:
    """Results whose gradients the graph takes in one layout: contiguous, and for a result that overlaps itself."""
    return ((x * 2).view(2, 3), (x.sum() * y).sum().expand(2, 3))


@call(lambda: (needs_grad(4), needs_grad(4)))
def gradients_of_data_dependent_sizes(x: Tensor, y: Tensor) -> Any:
    """Two results, one of a size that only the data knows."""
    return (x[x > 0] * 2, x * y)


@call(lambda: (non_leaf(3), needs_grad(3)))
def input_changed_with_gradients(x: Tensor, y: Tensor) -> Tensor:
    """An input that is changed where gradients are recorded."""
    x.mul_(y)
    return x * 2


@call(lambda: (needs_grad(3, 2),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=0, max=64)}})
def sizes_that_may_be_zero(x: Tensor) -> Tensor:
    """A size that may be 0, and is the double of another less one."""
    return x * 2


@call(lambda: (ramp(2, 2), ramp(2, 2), needs_grad(2, 2)), programs=("train", "infer"))
def changes_that_undo_each_other(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Inputs whose versions rise by more than their changes: turned twice, and written to twice."""
    x.t_().t_()
    y.mul_(2).add_(1)
    return x * w + y


@call(lambda: (needs_grad(2, 3),))
def parts_that_are_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Results from parts of an input, whose gradients the graph puts together."""
    first, second = x.unbind()
    return first * 2, second.sin()


@call(lambda: (needs_grad(3), torch.tensor([2, 0, 1])))
def lookup_in_regions(x: Tensor, rows: Tensor) -> Tensor:
    """A call that fails for some arguments, within regions that change grad mode and autocast."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        picked = x[rows]
    return x * picked.float()


@call(lambda: (ramp(2, 2), needs_grad(2, 2)))
def view_that_comes_to_require_grad(x: Tensor, w: Tensor) -> Any:
    """A view of an input without gradient that the call makes a leaf of its own."""
    return (x.view(-1).requires_grad_(), x * w)


@call(lambda: (needs_grad(3),))
def gradients_that_are_added(x: Tensor) -> Any:
    """Two results of an input, the gradient of one of which has no memory of its own."""
    return (x.sum(), x.sin())


@call(lambda: (needs_grad(3), needs_grad(3)))
def gradient_that_is_zero(x: Tensor, y: Tensor) -> Any:
    """An input whose gradient is zero, whatever the gradient of the result is."""
    return x * 2 + y * 0


@call(lambda: (ramp(3), [ramp(3)], [ramp(3) * 2]), programs=("infer",))
def list_beside_another(x: Tensor, kept: list[Any], read: list[Any]) -> Tensor:
    """A list that the call changes, and one that it reads."""
    kept.append(x * 2)
    return x * read[0]


@call(lambda: (needs_grad(2, 3), needs_grad(2, 3)))
def views_on_the_way_to_others(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A returned view of an input that others are made of: a detached part of it, and views of a product."""
    flat = x.view(-1)
    product = flat * 2
    return flat, flat.split(3)[0].detach(), product.view(-1), product.view(2, 3), x * w


@call(lambda: (non_leaf(2, 2),))
def view_that_turns_back(x: Tensor) -> tuple[Tensor, ...]:
    """A returned view that is turned, and one of it that is turned again."""
    turned = x.t()
    return turned, turned.t(), x * 2
