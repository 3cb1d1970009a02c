"""What the runtime brings into a fresh interpreter: no torch to look at a bundle, none of its compilers to run one."""

import json
import subprocess
import sys

LOOK = """
import aotexport_runtime
from aotexport_runtime.module.describe import describe
text = describe(aotexport_runtime.open_bundle({path!r}), graph=True)
assert "aten::linear.default" in text
"""
TRAIN = """
import sys, torch
before = set(sys.modules)
import aotexport_runtime
module = aotexport_runtime.load({path!r}, target="portable")
module(torch.ones(3, 4, requires_grad=True))["best"].sum().backward()
assert module.linear.weight.grad is not None
module.eval()(torch.ones(3, 4))
"""
REPORT = """
import json, sys
print(json.dumps(sorted(set(sys.modules) - globals().get("before", set()))))
"""

FORBIDDEN = (
    *("aotexport", "sympy", "triton", "transformers"),
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch.export", "torch._export"),
)


def modules_after(code: str) -> set[str]:
    process = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return set(json.loads(process.stdout))


def forbidden(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name in FORBIDDEN or name.startswith(tuple(f"{f}." for f in FORBIDDEN)))


def test_looking_at_a_bundle_imports_no_torch(tiny):
    modules = modules_after(LOOK.format(path=str(tiny)))
    assert sorted(name for name in modules if name.partition(".")[0] in ("torch", "safetensors", "aotexport")) == []


def test_loading_and_training_bring_no_compiler_and_no_model_code(tiny):
    brought = modules_after(TRAIN.format(path=str(tiny)))
    assert forbidden(brought) == []
    assert "aotexport_runtime.module.bundle_module" in brought
