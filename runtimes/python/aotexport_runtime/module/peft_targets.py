"""What peft decides by a transformers model's own code, and so decides otherwise on a loaded bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotexport_runtime.errors import NotSupported
from aotexport_runtime.schema.manifest import Manifest
from aotexport_runtime.submodules.changes import SubmoduleChange
from aotexport_runtime.submodules.submodule import LoadedSubmodule


def check_targets(configs: Mapping[str, Any], changes: Sequence[SubmoduleChange], manifest: Manifest) -> None:
    """Refuse adapters of peft on layers that it would not adapt, or would tie, on the original model.

    Source: peft 0.21, `tuners_utils._maybe_include_all_linear_layers`, `trainable_tokens.model`: the output layer and
    ties are those of a `PreTrainedModel` alone.

    Args:
        configs: settings of peft's adapters, by name.
        changes: changes of the module by them.
        manifest: of the module's bundle.

    Raises:
        NotSupported: names the layer, and what to pass to peft.
    """
    replaced = {change.path for change in changes if not isinstance(change.module, LoadedSubmodule)}
    tied = {name: (entry.name, *entry.tied) for entry in manifest.state for name in (entry.name, *entry.tied)}
    shapes = {name: entry.shape for entry in manifest.state for name in (entry.name, *entry.tied)}
    words = {shapes.get(f"{record.name}.weight") for record in manifest.modules if record.type == "Embedding"}
    linear = [record.name for record in manifest.modules if record.type == "Linear"]
    head = linear[-1] if linear and shapes.get(f"{linear[-1]}.weight") in words else None
    for config in configs.values():
        targets = getattr(config, "target_modules", None) or ()
        if head in replaced and not isinstance(targets, str) and set(linear) <= set(targets):
            raise NotSupported(
                f"`all-linear` of peft leaves an output layer out on a model of transformers, and adapts `{head}` of a "
                f"loaded bundle. Load the bundle again, and pass `exclude_modules=[{head!r}]` too, or names of layers"
            )
        tokens = getattr(config, "trainable_token_indices", None) or config.peft_type == "TRAINABLE_TOKENS"
        for path in replaced if tokens else ():
            others = [name for name in tied.get(f"{path}.weight", ()) if name != f"{path}.weight"]
            if others:
                raise NotSupported(
                    f"peft trains tokens of `{path}.weight` and `{others[0]}` as one on a model of transformers, and "
                    "knows no ties of a loaded bundle. Load the bundle again, and train whole weights, or export the "
                    "model without ties (`tie_word_embeddings=False`)"
                )
