"""Lowered programs and kernels that are not what they say."""

import zlib
from pathlib import Path

import pytest

from aotexport_runtime import BundleInvalid, NotSupported, load, open_bundle
from aotexport_runtime.bundle.packs import KERNELS, code_of, unpacked
from tests.hostile.crafted import FILES, Crafted

GOLDEN = Path(__file__).parents[1] / "golden/v1.0/kernels/bundle"
CANDIDATE = "kernels/0/candidates/0"
SIZE = {"kind": "size", "value": 3}


@pytest.fixture
def crafted(tmp_path):
    return Crafted(GOLDEN, tmp_path / "crafted")


def refusal(crafted: Crafted, *, backward: bool = False) -> str:
    crafted.seal()
    with pytest.raises(BundleInvalid) as caught:
        open_bundle(crafted.root).lowered_graph("cuda", "train", backward=backward)
    return str(caught.value)


def launch_of(crafted: Crafted, graph: str) -> tuple[int, dict]:
    """Return the first launch of a graph, with its index."""
    nodes = crafted.document(graph)["nodes"]
    return next((index, node) for index, node in enumerate(nodes) if node["op"].startswith("kernel::"))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("backward", None, "it has a backward and the program has no gradients, or the other way round"),
        ("forward", "../forward.json", "`LoweredProgram.forward` '../forward.json' is not a plain name"),
        ("saved", -1, "`LoweredProgram.saved` is -1; at least 0 is expected"),
        ("guards", [{"op": "lt", "args": ["nobody", 2]}], "unknown symbol 'nobody' in a size"),
    ],
)
def test_lowered_program_that_does_not_fit_its_program_is_refused(crafted, path, value, message):
    crafted.put("lowered", path, value)
    assert refusal(crafted) == f"{FILES['lowered']}: {message}"


def test_lowered_program_of_a_program_without_functional_graph_is_refused(crafted):
    crafted.put("program", "functional", None)
    assert refusal(crafted).endswith("the program has no functional graph to stand in for")


@pytest.mark.parametrize(("graph", "backward"), [("lowered forward", False), ("lowered backward", True)])
def test_lowered_graph_that_returns_another_number_of_values_is_refused(crafted, graph, backward):
    crafted.put(graph, "outputs/-", None)
    assert "the calling convention has" in refusal(crafted, backward=backward)


def test_lowered_forward_that_saves_no_tensor_is_refused(crafted):
    outputs = crafted.document("lowered forward")["outputs"]
    crafted.put("lowered forward", f"outputs/{len(outputs) - 1}", None)
    assert refusal(crafted) == f"{FILES['lowered forward']}: a saved value is no tensor"


def test_launch_of_a_kernel_that_is_not_there_is_refused(crafted):
    index, _ = launch_of(crafted, "lowered forward")
    crafted.put("lowered forward", f"nodes/{index}/op", "kernel::nobody")
    assert refusal(crafted) == f"{FILES['lowered forward']}: there is no kernel `nobody`"


@pytest.mark.parametrize(
    ("path", "value"),
    [("kwargs/more", 1), ("args", [1]), ("meta", {"kind": "tensor", "dtype": "float32", "shape": [], "stride": []})],
)
def test_launch_with_another_argument_or_a_result_is_refused(crafted, path, value):
    index, node = launch_of(crafted, "lowered forward")
    crafted.put("lowered forward", f"nodes/{index}/{path}", value)
    name = node["op"].removeprefix("kernel::")
    assert refusal(crafted) == f"{FILES['lowered forward']}: a launch of `{name}` has other arguments than the kernel"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [("in_ptr0", 1, "is no tensor of float32"), ("xnumel", "buf0", "is no number"), ("xnumel", None, "is no number")],
)
def test_launch_with_an_argument_of_another_kind_is_refused(crafted, argument, value, message):
    index, node = launch_of(crafted, "lowered forward")
    argument = argument if argument in node["kwargs"] else "in_out_ptr0"
    crafted.put("lowered forward", f"nodes/{index}/kwargs/{argument}", value)
    assert refusal(crafted).endswith(f"argument `{argument}` of `{node['op'].removeprefix('kernel::')}` {message}")


def test_lowered_graph_that_changes_the_interpreter_is_refused(crafted):
    crafted.node("lowered forward", op="torch::set_grad_enabled", args=[True], meta={"kind": "nothing"})
    assert "may not stand in a lowered graph" in refusal(crafted)


def test_functional_graph_that_launches_a_kernel_is_refused(crafted):
    index, node = launch_of(crafted, "lowered forward")
    crafted.node("joint", op=node["op"], meta={"kind": "nothing"})
    crafted.seal()
    with pytest.raises(BundleInvalid, match="in namespace `kernel`, which the manifest does not declare"):
        open_bundle(crafted.root).graph("train", "joint.json")
    assert index >= 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("packs/0/nbytes", 1 << 40, "`KernelPack.nbytes` is 1099511627776; at most 1073741824 is read"),
        ("kernels/0/candidates", [], "`Kernel.candidates` has 0 items"),
        ("kernels/0/parameters/0/alignment", 3, "is 3, no power of two"),
        (f"{CANDIDATE}/num_warps", 0, "`KernelCandidate.num_warps` is 0"),
        (f"{CANDIDATE}/grid/0", "in_ptr0", "unknown symbol 'in_ptr0' in a size"),
        (f"{CANDIDATE}/binaries/0/architecture", "sm_90", "'sm_90' is not in `KernelLibrary.packs.architecture`"),
        (f"{CANDIDATE}/binaries/0/offset", 1 << 20, "lies outside of its pack"),
        (f"{CANDIDATE}/binaries/0/nbytes", 1 << 20, "lies outside of its pack"),
        (f"{CANDIDATE}/binaries/0/global_scratch_alignment", 3, "alignment of the scratch memory"),
    ],
)
def test_kernel_record_out_of_bounds_is_refused(crafted, path, value, message):
    crafted.put("kernels", path, value)
    assert message in refusal(crafted)


def test_pack_of_another_size_than_recorded_is_refused(crafted):
    crafted.write("targets/cuda/kernels/sm_80.z", zlib.compress(b"\0" * 10_000_000))
    crafted.seal()
    bundle = open_bundle(crafted.root)
    with pytest.raises(BundleInvalid) as caught:
        unpacked(bundle, "sm_80")
    assert "it does not hold the" in str(caught.value)


def test_code_with_another_digest_is_refused():
    bundle = open_bundle(GOLDEN)
    pack = bytearray(unpacked(bundle, "sm_80"))
    binary = bundle.kernels("cuda").kernels[0].candidates[0].binaries[0]
    assert code_of(binary, bytes(pack))
    pack[binary.offset + 100] ^= 1
    with pytest.raises(BundleInvalid) as caught:
        code_of(binary, bytes(pack))
    assert str(caught.value) == f"{KERNELS}: the SHA-256 of a kernel's code differs from its record's"


def test_kernels_without_trust_are_refused():
    with pytest.raises(NotSupported) as caught:
        load(GOLDEN, target="cuda")
    assert str(caught.value) == "kernels are native code, which runs only with `trust='native'`"


def test_kernels_of_a_bundle_without_any_are_refused(tiny):
    with pytest.raises(NotSupported) as caught:
        load(tiny, target="cuda", trust="native")
    assert str(caught.value) == "the bundle has no kernels. Export it with `--target cuda`"
