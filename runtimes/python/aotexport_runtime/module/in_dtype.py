"""A loaded module in another floating dtype, with its current values."""

# A loaded module has its options in attributes without public names.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch

from aotexport_runtime.errors import ArgumentInvalid, NotSupported
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.cast import CastBundle, cast_bundle
from aotexport_runtime.submodules.adapter import adapters_below
from aotexport_runtime.values import dtypes


def in_dtype(module: BundleModule, dtype: torch.dtype) -> BundleModule:
    """Return an independent module that is `module.to(dtype)`, in its mode, with its values and what takes gradients.

    Args:
        module: a loaded bundle, trained or not; left as it is.
        dtype: `bfloat16`, `float16`, `float32` or `float64`.

    Raises:
        ArgumentInvalid: `dtype` is none, or a submodule was changed, or has an adapter.
        NotSupported: the dtype is not floating, the module was loaded in another dtype, or a program holds a dtype of
            its own.
    """
    if isinstance(module.bundle, CastBundle):
        raise NotSupported(f"`dtype`: the module was loaded in {module.bundle.dtype}; load it in the other one")
    changed = [f"`{change.path}` {change.how}" for change in module.changes() if not change.keeps_state]
    changed += [f"`{path}` has an adapter" for path, _ in adapters_below(module)]
    if changed:
        raise ArgumentInvalid(f"`dtype`: {changed[0]}. Load the bundle in that dtype (`load(dtype=)`), and change that")
    bundle = cast_bundle(module.bundle, dtype)
    before = module.state_tensors()
    state = {
        entry.name: before[entry.name].detach().to(dtypes.dtype(entry.dtype), copy=True)
        for entry in bundle.manifest.state
    }
    cast = BundleModule(bundle, state, environment=module._environment, request=module._request)
    for name, tensor in cast.state_tensors().items():
        if tensor.is_leaf and tensor.is_floating_point():
            tensor.requires_grad_(before[name].requires_grad)
    return cast.train(module.training)
