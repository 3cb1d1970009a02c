"""A loaded module as its own reference: calls run its forward graphs, by torch's own operators."""

# A loaded module has its options in attributes without public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator

from aotexport_runtime.engines.candidates import AUTOGRAD, Request
from aotexport_runtime.engines.select import NO_TARGETS
from aotexport_runtime.module.bundle_module import BundleModule


@contextlib.contextmanager
def forward_graphs_run(module: BundleModule) -> Generator[None, None, None]:
    """Let calls in the block run forward graphs under autograd, to the bit as eager runs the model.

    Args:
        module: a loaded bundle; afterwards it runs as it did before.
    """
    before = {name: module.__dict__[name] for name in ("_request", "_targets", "_environment")}
    environment = dataclasses.replace(before["_environment"], matmul="torch")
    # Bypasses `__setattr__`, which handles the user's names.
    module.__dict__ |= {"_request": Request(target=AUTOGRAD), "_targets": NO_TARGETS, "_environment": environment}
    module.changed()
    try:
        yield
    finally:
        module.__dict__ |= before
        module.changed()
