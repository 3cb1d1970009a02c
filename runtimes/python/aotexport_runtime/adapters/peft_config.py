"""`adapter_config.json`: peft's settings of an adapter, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotexport_runtime.adapters.config import LoraConfig
from aotexport_runtime.adapters.targets import Target, layer_of
from aotexport_runtime.errors import ArgumentInvalid, NotSupported

CONFIG_FILE = "adapter_config.json"
_WITHOUT = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Settings of which any value but the default computes something else."""


def config_record(config: LoraConfig, targets: Sequence[Target], base: str) -> dict[str, Any]:
    """Return peft's settings of an adapter.

    Args:
        config: its settings.
        targets: the weights that it changes.
        base: name of the model.
    """
    layers = [target for target in targets if target.form == "graph"]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "bias": config.bias,
        "modules_to_save": [*config.modules_to_save] or None,
        "target_modules": [layer_of(target.name) for target in layers],
        "target_parameters": [target.name for target in targets if target.form == "weight"] or None,
        "fan_in_fan_out": bool(layers) and all(target.kind == "transposed" for target in layers),
        "init_lora_weights": True,
        "alpha_pattern": dict(config.alphas),
        "rank_pattern": {},
    }


def read_config(directory: Path) -> LoraConfig:
    """Return the settings of the adapter in a directory.

    Raises:
        ArgumentInvalid: there is none, or it cannot be read.
        NotSupported: the adapter is no LoRA, or one of a kind that this runtime does not compute.
    """
    path = directory / CONFIG_FILE
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentInvalid(f"`path`: no adapter can be read from {str(path)!r}: {error}") from error
    if not isinstance(record, dict) or record.get("peft_type") != "LORA":
        found = record.get("peft_type") if isinstance(record, dict) else type(record).__name__
        raise NotSupported(f"{path}: expected `peft_type` LORA, got {found}")
    _check_known(record, path)
    alphas = record.get("alpha_pattern") or {}
    return LoraConfig(
        r=record.get("r", 8),
        alpha=record.get("lora_alpha", 8),
        dropout=record.get("lora_dropout", 0.0),
        use_rslora=bool(record.get("use_rslora")),
        use_dora=bool(record.get("use_dora")),
        bias=record.get("bias", "none"),
        modules_to_save=tuple(record.get("modules_to_save") or ()),
        alphas=tuple((str(pattern), float(alpha)) for pattern, alpha in alphas.items()),
    )


def _check_known(record: Mapping[str, Any], path: Path) -> None:
    used = [name for name in _WITHOUT if record.get(name)]
    if used:
        raise NotSupported(f"{path}: `{used[0]}` is {record[used[0]]!r}, which loaded bundles do not compute")
