"""What counts as the same result."""

import weakref

import numpy
import pytest
import torch

from aotexport_runtime.values.compare import compare
from aotexport_runtime.values.observe import Inputs, Observation, observe, sampled


def seen(tensor: torch.Tensor) -> Observation:
    observation = Observation()
    observation.tensor("output", tensor)
    return observation


@pytest.mark.parametrize(("factor", "agrees"), [(1 + 1e-3, True), (1 + 1e-1, False)])
def test_least_tolerance_is_that_of_finer_dtypes_as_well(factor: float, agrees: bool) -> None:
    tensor = torch.ones(3, dtype=torch.float64)

    assert [d.agrees for d in compare(seen(tensor), seen(tensor * factor), least=4e-2)] == [agrees]
    assert [d.agrees for d in compare(seen(tensor), seen(tensor * factor))] == [False]


@pytest.mark.parametrize(
    ("dtype", "factor", "agrees"),
    [
        (torch.float32, 1 + 1e-6, True),
        (torch.float32, 1 + 1e-3, False),
        (torch.float64, 1 + 1e-8, True),
        (torch.float64, 1 + 1e-6, False),
    ],
)
def test_norm_of_a_large_tensor_is_compared_by_the_tolerance_of_the_tensor(
    dtype: torch.dtype, factor: float, agrees: bool
) -> None:
    tensor = torch.linspace(1, 2, 10_000, dtype=torch.float64)
    differences = compare(seen(tensor.to(dtype)), seen((tensor * factor).to(dtype)))
    assert {difference.name: difference.agrees for difference in differences} == {
        "output norms": agrees,
        "output": agrees,
    }


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF, -INF], [1.0, INF, -INF], 0.0),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([NAN, NAN], [NAN, 0.0], INF),
        ([1.0, INF], [1.0, NAN], INF),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, 2.0], [1.0, INF], INF),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_number_agrees_with_the_same_alone(
    expected: list[float], got: list[float], error: float, dtype: torch.dtype
) -> None:
    (difference,) = compare(seen(torch.tensor(expected, dtype=dtype)), seen(torch.tensor(got, dtype=dtype)), least=0.5)
    assert (difference.error, difference.agrees) == (error, error == 0.0)


def test_nan_between_the_elements_that_are_kept_shows_in_the_norm() -> None:
    tensor = torch.ones(10_000)
    other = tensor.clone()
    other[1] = NAN
    assert {d.name: (d.error, d.agrees) for d in compare(seen(tensor), seen(other))} == {
        "output norms": (INF, False),
        "output": (0.0, True),
    }


def test_records_without_a_number_keep_the_norm_of_a_large_tensor_alone() -> None:
    kept = sampled("output", torch.ones(10_000), None)
    assert {name: value.numel() for name, value in kept.items()} == {"output norm": 1, "output": 3334}


@pytest.mark.parametrize("sparing", [False, True])
@pytest.mark.parametrize(("dropped", "second"), [((), 6.0), (("weight",), 3.0)], ids=["kept", "dropped"])
def test_gradient_of_the_second_call_is_added_to_the_first_unless_that_is_dropped(
    dropped: tuple[str, ...], second: float, sparing: bool
) -> None:
    weight = torch.tensor([2.0], requires_grad=True)
    found = observe(
        lambda values: (weight * values[0]).clone(),
        lambda: Inputs([torch.tensor([3.0])], [None]),
        ["x"],
        lambda: {"weight": weight},
        lambda value: [("output", value)],
        seed=0,
        calls=2,
        backward=True,
        dropped=dropped,
        sparing=sparing,
    )
    cotangent = torch.cos(torch.tensor(0.3))
    first, last = (found.values[f"call {number}: gradient of weight"] for number in range(2))
    torch.testing.assert_close((first, last), (3.0 * cotangent.reshape(1), second * cotangent.reshape(1)))
    assert (weight.grad is None) == bool(dropped)


def test_memory_of_the_state_is_kept_so_that_none_takes_its_place() -> None:
    memory = numpy.ones(64, numpy.float32)
    weight, before = torch.from_numpy(memory).requires_grad_(), weakref.ref(memory)
    del memory

    def call(values: list[torch.Tensor]) -> torch.Tensor:
        weight.data = torch.ones(64)
        assert before() is not None
        return values[0]

    def flat(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [("output", value)]

    inputs = Inputs([torch.ones(1)], [None])
    observe(call, lambda: inputs, ["x"], lambda: {"weight": weight}, flat, seed=0, calls=1, backward=False)
