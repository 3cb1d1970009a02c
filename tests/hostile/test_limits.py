"""What a bundle may ask for: numbers, lists, loops and memory, with metadata that lies about them."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

import aotexport_runtime
from aotexport_runtime import BundleInvalid, CheckFailed, Limits
from aotexport_runtime.schema.values import TensorMeta
from tests.hostile.crafted import Crafted, schema_of

WHERE = "programs/train/forward.json"
SIZE = {"kind": "size"}
FLOAT = {"kind": "scalar", "type": "float"}
INTEGER = "an integer of at most 64 bits"
BODY = {"kind": "subgraph", "name": "body"}


def tensor(*shape: int) -> dict[str, Any]:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * shape[axis + 1]
    return {"kind": "tensor", "dtype": "float32", "shape": list(shape), "stride": stride}


def failure(crafted: Crafted, **limits: int) -> str:
    """Return why a call by the forward graph is refused."""
    with pytest.raises((BundleInvalid, CheckFailed)) as caught:
        aotexport_runtime.load(crafted.seal(), target="autograd", limits=Limits(**limits))(torch.ones(3, 4))
    return str(caught.value)


def body(crafted: Crafted, name: str, inputs: dict[str, Any], nodes: list[dict[str, Any]], outputs: list[Any]) -> None:
    values = [{"name": key, "meta": meta} for key, meta in inputs.items()]
    crafted.put("forward", f"subgraphs/{name}", {"inputs": values, "nodes": nodes, "outputs": outputs})


def test_integer_that_grows_from_subgraph_to_subgraph_is_refused(crafted: Crafted):
    crafted.node("forward", name="n0", op="aten::sym_size.int", args=["linear", 1], meta=SIZE)
    squares = [{"name": f"s{i}", "op": "python::mul", "args": [f"s{i - 1}"] * 2, "meta": SIZE} for i in range(1, 4)]
    body(crafted, "body", {"s0": SIZE}, squares, ["s3"])
    several = {"kind": "sequence", "items": [SIZE]}
    for step in range(6):
        args = [BODY, [f"n{step}"]]
        crafted.node("forward", name=f"g{step}", op="higher_order::invoke_subgraph", args=args, meta=several)
        crafted.node("forward", name=f"n{step + 1}", op="python::getitem", args=[f"g{step}", 0], meta=SIZE)
    # 3 ** 8, then (3 ** 8) ** 8, which has 102 bits.
    assert failure(crafted) == f"a graph expects {INTEGER}, and got one of 102 bits"


def test_integer_of_data_that_says_to_be_a_float_is_refused(crafted: Crafted):
    # No rule infers the dtype of `bucketize`.
    crafted.node("forward", name="bounds", op="aten::ones.default", args=[[1]], meta=tensor(1))
    crafted.node("forward", name="i", op="aten::bucketize.Scalar", args=[2, "bounds"], meta=tensor())
    crafted.node("forward", name="a", op="aten::item.default", args=["i"], meta=FLOAT)
    crafted.node("forward", name="b", op="python::pow", args=["a", 10**8], meta=FLOAT)
    assert failure(crafted) == "a graph expects a float, and got one of 1 bits"


def test_float_beyond_64_bits_makes_no_integer(crafted: Crafted):
    crafted.node("forward", op="python::floor", args=[1e300], meta=SIZE)
    assert failure(crafted) == "a number of the graph has more than 64 bits"


def test_graph_of_an_unreasonable_number_of_nodes_is_refused(crafted: Crafted):
    assert crafted.refusal(Limits(nodes=6)) == f"{WHERE}: 7 nodes; at most 6 are read"


def test_stricter_limit_of_bits_holds(crafted: Crafted):
    crafted.node("forward", name="n", op="aten::sym_size.int", args=["linear", 1], meta=SIZE)
    crafted.node("forward", name="m", op="python::mul", args=["n", "n"], meta=SIZE)
    message = "may give numbers of more than 64 bits"
    assert crafted.refusal(Limits(number_nbits=64)) == f"{WHERE}: builtin `python::mul` {message}"


def test_loop_without_end_is_ended(crafted: Crafted):
    body(crafted, "body", {"x": tensor(3, 3)}, [], ["x"])
    body(crafted, "true", {"x": tensor(3, 3)}, [], [True])
    args = [{"kind": "subgraph", "name": "true"}, BODY, ["linear"], []]
    several = {"kind": "sequence", "items": [tensor(3, 3)]}
    crafted.node("forward", op="higher_order::while_loop", args=args, meta=several)
    expected = "a loop makes step 101; at most 100 are made (`Limits.iterations` of `load`)"
    assert failure(crafted, iterations=100) == expected


def test_bodies_that_call_bodies_end_after_a_number_of_operators(crafted: Crafted):
    value, several = {"x": tensor(3, 3)}, {"kind": "sequence", "items": [tensor(3, 3)]}
    nodes = [{"name": "y", "op": "aten::relu.default", "args": ["x"], "meta": tensor(3, 3)}]
    inner: dict[str, Any] = {"schemas": {"aten::relu.default": schema_of("aten::relu.default")}}
    call = {"op": "higher_order::invoke_subgraph", "args": [BODY, ["x"]], "meta": several}
    graph: dict[str, Any] = {}
    for _ in range(12):  # Ten calls of the body within, each of which makes ten of its own.
        graph = {"inputs": [{"name": "x", "meta": value["x"]}], "nodes": nodes, "outputs": ["x"], **inner}
        nodes, inner = [{"name": f"c{index}", **call} for index in range(10)], {"subgraphs": {"body": graph}}
    crafted.put("forward", "subgraphs", {"body": graph})
    crafted.node("forward", name="called", op=call["op"], args=[BODY, ["linear"]], meta=several)
    expected = "a call runs more than 10000 operators in bodies (`Limits.calls` of `load`)"
    assert failure(crafted, calls=10_000) == expected


def test_loop_over_too_many_rows_does_not_begin(crafted: Crafted):
    crafted.node("forward", name="one", op="aten::ones.default", args=[[1]], meta=tensor(1))
    rows = {**tensor(1), "shape": [1 << 40], "stride": [0]}
    crafted.node("forward", name="rows", op="aten::expand.default", args=["one", [1 << 40]], meta=rows)
    body(crafted, "body", {"x": tensor()}, [], ["x"])
    several = {"kind": "sequence", "items": [tensor(1)]}
    crafted.node("forward", op="higher_order::map_impl", args=[BODY, ["rows"], []], meta=several)
    expected = f"a loop makes step {1 << 40}; at most 1000000 are made (`Limits.iterations` of `load`)"
    assert failure(crafted) == expected


LISTS = [
    ("aten::unbind.int", ["rows"], 1 << 40),
    ("aten::split.Tensor", ["rows", 2], 1 << 39),
    ("aten::chunk.default", ["rows", 1 << 30], 1 << 30),
    ("aten::tensor_split.sections", ["rows", 1 << 30], 1 << 30),
]


@pytest.mark.parametrize(("op", "args", "count"), LISTS, ids=[op for op, *_ in LISTS])
def test_list_longer_than_the_graph_says_is_not_made(crafted: Crafted, op, args, count):
    crafted.node("forward", name="one", op="aten::ones.default", args=[[1]], meta=tensor(1))
    rows = {**tensor(1), "shape": [1 << 40], "stride": [0]}
    crafted.node("forward", name="rows", op="aten::expand.default", args=["one", [1 << 40]], meta=rows)
    crafted.node("forward", op=op, args=args, meta={"kind": "sequence", "items": [tensor(2)] * 3})
    assert failure(crafted) == f"operator `{op}` gives {count} results, and the graph has 3"


@pytest.mark.parametrize(
    ("op", "args"), [("aten::split.Tensor", ["six", 3]), ("aten::split_with_sizes.default", ["six", [2, 4]])]
)
def test_list_shorter_than_the_graph_says_is_refused(crafted: Crafted, op, args):
    crafted.node("forward", name="six", op="aten::ones.default", args=[[6]], meta=tensor(6))
    crafted.node("forward", name="list", op=op, args=args, meta={"kind": "sequence", "items": [tensor(3)] * 3})
    crafted.node("forward", op="python::getitem", args=["list", 2], meta=tensor(3))
    assert failure(crafted) == f"operator `{op}` gives 2 results, and the graph has 3"


def test_list_beyond_the_limit_is_refused(crafted: Crafted):
    crafted.node("forward", op="aten::unbind.int", args=["linear"], meta={"kind": "sequence", "items": [tensor(3)] * 9})
    expected = f"{WHERE}: 9 results of a node; at most 8 are read"
    assert crafted.refusal(Limits(results=8)) == expected


SIZED = [
    ("aten::zeros.default", [[1 << 20, 1 << 20]], 4 << 40),
    ("aten::arange.default", [1 << 40], 4 << 40),
    ("aten::new_zeros.default", ["linear", [1 << 40]], 4 << 40),
    ("aten::randint.low", [-(1 << 62), 1 << 62, [1 << 40]], 4 << 40),
]


@pytest.mark.parametrize(("op", "args", "nbytes"), SIZED, ids=[op for op, *_ in SIZED])
def test_memory_of_literal_sizes_beyond_the_limit_is_refused(crafted: Crafted, op, args, nbytes):
    crafted.node("forward", op=op, args=args, meta=tensor())
    message = f"`{op}` takes the graph's memory to {nbytes} bytes; at most 1073741824 are given"
    assert crafted.refusal(Limits(allocation_nbytes=1 << 30)) == f"{WHERE}: {message}"


def test_memory_that_is_alive_at_once_counts_and_freed_memory_does_not(crafted: Crafted):
    for step in range(9):
        crafted.node("forward", name=f"z{step}", op="aten::zeros.default", args=[[256]], meta=tensor(256))
    crafted.read(Limits(allocation_nbytes=4096))
    crafted.put("forward", "outputs", [f"z{step}" for step in range(9)])
    message = "`aten::zeros.default` takes the graph's memory to 5120 bytes; at most 4096 are given"
    assert crafted.refusal(Limits(allocation_nbytes=4096)) == f"{WHERE}: {message}"


def test_files_beyond_the_limit_are_refused(crafted: Crafted):
    sealed = crafted.seal()
    nbytes = sum(entry.nbytes for entry in aotexport_runtime.open_bundle(sealed).manifest.files)
    with pytest.raises(BundleInvalid) as caught:
        aotexport_runtime.open_bundle(sealed, limits=Limits(bundle_nbytes=1000))
    assert str(caught.value) == f"bundle.json: the files have {nbytes} bytes; at most 1000 are read"


READ = """
import resource, sys, time
import aotexport_runtime
import numpy, aotexport_runtime.bundle.read
began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bundle = aotexport_runtime.open_bundle(sys.argv[1])
try:
    bundle.read_graphs()
except aotexport_runtime.BundleInvalid as error:
    print(error)
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)
"""


@pytest.mark.parametrize("limits", [Limits(json_containers=100_000), Limits(json_nbytes=1_000_000)])
def test_small_file_that_uses_a_large_entry_of_a_table_often_is_refused(crafted: Crafted, limits: Limits):
    crafted.put("forward", "metas", [{"kind": "sequence", "items": [tensor()] * 1000}])
    for index in range(100):
        crafted.node("forward", name=f"n{index}", op="aten::relu.default", args=["linear"], meta=0)
    message = "with what its tables hold in the place of indexes it is larger than what is read of a file"
    assert crafted.refusal(limits) == f"{WHERE}: {message}"


def test_100_mb_of_values_are_refused_in_little_memory(crafted: Crafted):
    items = b",".join([b"[[[]]]"] * 11_000_000)
    crafted.write(WHERE, b'{"inputs": [], "nodes": [], "outputs": [' + items + b"]}")
    done = subprocess.run([sys.executable, "-c", READ, crafted.seal()], capture_output=True, text=True, check=True)
    message, figures = done.stdout.splitlines()
    assert message == f"{WHERE}: more than the 8388608 lists and objects that are read of a file"
    assert float(figures.split()[1]) <= 200_000  # kB


def shapes_of_one_hash(count: int) -> list[list[int]]:
    """Return shapes whose tuples all have the same hash in Python, and no elements."""
    sizes = [0, *(k * (2**61 - 1) for k in (1, 2, 3))]
    return [list(shape) for shape in itertools.islice(itertools.product(sizes, repeat=8), count)]


@pytest.mark.parametrize("in_table", [True, False])
def test_shapes_of_one_hash_are_compared_with_few_others(crafted: Crafted, in_table: bool, monkeypatch):
    shapes = [shape for shape in shapes_of_one_hash(2000) if 0 in shape]
    metas = [{"kind": "tensor", "dtype": "float32", "shape": shape, "stride": [1] * 8} for shape in shapes]
    if in_table:
        crafted.put("forward", "metas", metas)
    for index, meta in enumerate(metas):
        values = {"meta": index if in_table else meta, "kwargs": {}}
        crafted.node("forward", name=f"n{index}", op="aten::sum.dim_IntList", args=["linear", meta["shape"]], **values)
    compared = 0

    def equal(self: TensorMeta, other: object) -> bool:
        nonlocal compared
        compared += 1
        return self is other

    assert len({hash(tuple(shape)) for shape in shapes}) == 1
    monkeypatch.setattr(TensorMeta, "__eq__", equal)
    crafted.read()
    assert compared <= 10 * len(shapes)
