"""Settings of an adapter: checked, and read from and written to peft's `adapter_config.json`."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aotexport_runtime.adapters.targets import Target, layer_of
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, NotSupported
from aotexport_runtime.schema.codec import decode_plain
from aotexport_runtime.schema.limits import Limits

Bias = Literal["none", "all", "lora_only"]
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_WANTED = {
    "r": "an integer of at least 1",
    "alpha": "a number above 0",
    "dropout": "a number from 0 to below 1",
    "bias": "'none', 'all' or 'lora_only'",
}


class LoraConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"alpha": "lora_alpha", "dropout": "lora_dropout", "alphas": "alpha_pattern"},
):
    """Settings of an adapter that change what is computed, see `add_lora`; in files by the names that peft gives them.

    Attributes:
        alphas: `alpha` of layers of their own, by the pattern of their path; see `as_glob`.
    """

    r: Annotated[int, Meta(ge=1, le=1 << 31)] = 8
    # What it scales stays finite.
    alpha: Annotated[int, Meta(gt=0, le=1 << 62)] | Annotated[float, Meta(gt=0, le=1e30)] = 8
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool | None = False
    use_dora: bool | None = False
    bias: Bias = "none"
    modules_to_save: Annotated[tuple[_Name, ...], Meta(max_length=256)] | None = None
    alphas: Annotated[dict[_Name, Annotated[float, Meta(gt=0, le=1e30)]], Meta(max_length=1024)] | None = None

    def __post_init__(self) -> None:
        """Refuse values out of their range (`ArgumentInvalid`)."""
        types = {field.name: field.type for field in msgspec.structs.fields(type(self))}
        for name, wanted in _WANTED.items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, types[name])
            except msgspec.ValidationError:
                raise ArgumentInvalid(f"`{name}`: expected {wanted}, got {value!r}") from None
        for pattern in self.alphas or ():
            as_glob(pattern)

    def scaling(self, path: str, r: int) -> float:
        """Return the factor of the change of the layer at `path`, of rank `r`."""
        alphas = (self.alphas or {}).items()
        own = (alpha for pattern, alpha in alphas if _matcher(pattern)(f".{path}"))
        alpha = next(own, self.alpha)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


_TOKEN = r"\.\*|\\[-.d]|\[(?:\w-\w|\w)+\]|[-.\w]"
_PATTERN = re.compile(rf"\^?(?:{_TOKEN})+")
_GLOBS = {".*": "*", ".": "?", r"\d": "[0-9]", r"\.": ".", r"\-": "-"}


def as_glob(pattern: str) -> str:
    r"""Return a pattern of peft as one of `fnmatch` for paths behind a dot, whose time grows with their lengths alone.

    It is a path or its end, or a regular expression of letters, digits, `_`, `-`, `.`, `\.`, `\d`, `[0-3]` and `.*`,
    with `^` at its begin of whole paths; others are refused (`ArgumentInvalid`).
    """
    if not _PATTERN.fullmatch(pattern):
        raise ArgumentInvalid(
            f"`alpha_pattern`: {pattern[:80]!r} is no path of layers, and of regular expressions only `.`, `\\.`, "
            "`\\d`, `.*`, `[0-3]` and `^` at the begin are read. Write the paths of the layers one by one"
        )
    glob = re.sub(_TOKEN, lambda token: _GLOBS.get(token[0], token[0]), pattern.removeprefix("^"))
    return f".{glob}" if pattern.startswith("^") else f"*.{glob}"


@functools.lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(as_glob(pattern))).match


CONFIG_FILE = "adapter_config.json"
LIMITS = Limits(json_nbytes=1 << 24, json_containers=1 << 16)
"""How large the file may be."""
_KNOWN = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size"),
    *("rank_pattern", "revision", "target_modules", "target_parameters", "task_type", "peft_type"),
}
"""Settings that say which layers an adapter is for, or how its training began: its tensors say it too."""
_BEGUN = (True, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights under an adapter as they are."""


def config_record(config: LoraConfig, targets: Sequence[Target], base: str) -> dict[str, Any]:
    """Return peft's settings of an adapter of these weights; `base` is the model's name."""
    layers = [target for target in targets if target.form == "graph"]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        **msgspec.to_builtins(config),
        "target_modules": [layer_of(target.name) for target in layers],
        "target_parameters": [target.name for target in targets if target.form == "weight"] or None,
        "fan_in_fan_out": bool(layers) and all(target.kind == "transposed" for target in layers),
        "init_lora_weights": True,
        "alpha_pattern": config.alphas or {},
        "rank_pattern": {},
    }


def read_config(data: bytes, path: Path) -> LoraConfig:
    """Return the settings in a file, whose `path` is for errors.

    Raises:
        ArgumentInvalid: they cannot be read, or one is out of its range.
        NotSupported: the adapter is no LoRA, or one of a kind that this runtime does not compute.
    """
    try:
        record = decode_plain(data, where=CONFIG_FILE, limits=LIMITS)
    except BundleInvalid as error:
        raise ArgumentInvalid(f"`path`: no adapter can be read from {str(path.parent)!r}: {error}") from None
    found = record.get("peft_type") if isinstance(record, dict) else type(record).__name__
    if found != "LORA":
        raise NotSupported(f"{path}: expected `peft_type` LORA, got {str(found)[:80]}")
    computed = _KNOWN.union(LoraConfig.__struct_encode_fields__)
    for name, value in record.items():
        if value and (value not in _BEGUN if name == "init_lora_weights" else name not in computed):
            raise NotSupported(f"{path}: `{name[:80]}` is {str(value)[:80]}, which loaded bundles do not compute")
    try:
        return msgspec.convert(record, LoraConfig)
    except msgspec.ValidationError as error:
        raise ArgumentInvalid(f"{path}: {str(error)[:300]}") from None
