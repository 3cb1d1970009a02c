"""Compiles kernels: `python -m aotexport.lower.cuda.worker SCRATCH CACHE` answers each line with a line.

Code goes to a file of the cache, after a line of facts about it. It is a process of its own, because the code
generator aborts its process on unknown constructs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Compile until standard input ends."""
    scratch, cache = map(Path, sys.argv[1:])
    # Output of libraries must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        job, answer = json.loads(line), dict[str, str]()
        try:
            _compile(job, scratch, cache)
        except Exception as error:  # noqa: BLE001 - classified below
            # Torch is imported for failed jobs alone.
            from aotexport.model.refusals import is_bug

            lines = [text for text in str(error).strip().splitlines() if text.strip()] or [""]
            answer = {"error": f"{type(error).__name__}: {lines[-1][:300]}"}
            if is_bug(error):
                answer["bug"] = "".join(traceback.format_exception(error))
        answers.write(json.dumps(answer) + "\n")


def _compile(job: dict[str, Any], scratch: Path, cache: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    path = scratch / f"{job['name']}.py"
    if not path.exists():
        path.write_text(job["text"], encoding="utf-8")
    function = getattr(module_in(path, job["name"]), job["name"])
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in job["divisible"]}
    source = ASTSource(function, job["signature"], job["constants"], attributes)
    target = GPUTarget("cuda", int(job["architecture"].removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=job["options"])
    metadata = compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "tensordesc_meta", None):
        raise NotImplementedError("clusters of blocks and tensor descriptors are not supported")
    lines = [line for line in compiled.asm["ptx"].splitlines() if line.strip() and not line.strip().startswith("//")]
    code, both = compiled.asm["cubin"], compiled.asm["cubin"] + ("\n".join(lines) + "\n").encode("ascii")
    facts = {
        "code_nbytes": len(code),
        "sha256": hashlib.sha256(both).hexdigest(),
        "shared_nbytes": metadata.shared,
        "global_scratch_nbytes": getattr(metadata, "global_scratch_size", 0),
        "global_scratch_alignment": getattr(metadata, "global_scratch_align", 1),
    }
    with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
        file.write(json.dumps(facts).encode() + b"\n" + both)
    os.replace(file.name, cache / job["key"])


def module_in(path: Path, name: str) -> Any:
    """Run the module in a file; return it."""
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
