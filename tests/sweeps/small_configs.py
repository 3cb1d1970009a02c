"""Models of transformers by the names of their types: every configuration is made small by the names of its fields."""

import json
from pathlib import Path
from typing import Any

import transformers

from tests.sweeps import transformers_models
from tests.sweeps.transformers_models import Model

HEADS, LAYERS = 4, 2
_LISTED = json.loads(Path(__file__).with_name("transformers.json").read_text())
SMALL: dict[str, Any] = {name: value for value, names in _LISTED["small"] for name in names.split()}
"""A small value for each name that configurations use for a size; the rest is as published."""

WIDTHS = ("hidden_sizes", "embed_dim", "embed_dims", "encoder_hidden_sizes")
"""Fields with one width a stage, which become an eighth."""

LAYER_KINDS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Fields with one entry a layer."""


def _model(auto: str, inputs: str, config: dict[str, Any]) -> Model:
    return Model(auto, getattr(transformers_models, inputs), config)


MODELS = {name: _model(*listed) for name, listed in _LISTED["special"].items()} | {
    name: _model(auto, inputs, {}) for auto, inputs, names in _LISTED["types"] for name in names.split()
}
"""Models by type: the first need more than small sizes, or calls of their own."""


def small(name: str) -> dict[str, Any]:
    """Return the fields of a type's configuration, and of those in it, that make it small."""
    published = transformers.AutoConfig.for_model(name)
    fields = {key: value for key, value in SMALL.items() if _is_set(published, key) and not _stages(published, key)}
    fields |= {key: [size // 8 for size in _stages(published, key)] for key in WIDTHS if _stages(published, key)}
    if depths := _stages(published, "depths"):
        fields["depths"] = [1 for _ in depths]
        fields.pop("num_hidden_layers", None)
    if "kv_lora_rank" in fields:
        # Keys come from one latent vector, so that they have as many heads as queries.
        fields["num_key_value_heads"] = HEADS
    parts = {key: getattr(part, "model_type", "") for key, part in published.sub_configs.items()}
    fields |= {key: small(name) for key, name in parts.items() if name}
    for key in LAYER_KINDS:
        kinds = _stages(published, key)
        if len(kinds) > LAYERS and _is_set(published, key):
            # One layer of each of the first two kinds.
            fields[key] = [*dict.fromkeys(kinds), kinds[0]][:LAYERS]
    return fields


def _stages(config: transformers.PretrainedConfig, key: str) -> list[Any]:
    """Return the entries of a field that is a list, else none."""
    value = getattr(config, key, None)
    return list(value) if isinstance(value, (list, tuple)) else []


def _is_set(config: transformers.PretrainedConfig, key: str) -> bool:
    """Return whether a configuration has a field that its constructor takes."""
    computed = getattr(type(config), config.attribute_map.get(key, key), None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    return hasattr(config, key) or key in config.attribute_map
