"""Settings of an adapter: checked, and read from and written to peft's `adapter_config.json`."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aotexport_runtime.adapters.targets import Target, layer_of
from aotexport_runtime.errors import ArgumentInvalid, BundleInvalid, NotSupported
from aotexport_runtime.schema.codec import decode_plain
from aotexport_runtime.schema.limits import Limits

Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of an adapter; see `add_lora`.

    Attributes:
        alphas: `alpha` of layers of their own, by the pattern of their path; see `as_glob`.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: Bias = "none"
    modules_to_save: tuple[str, ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse values out of their range (`ArgumentInvalid`)."""
        if not _is_int(self.r) or self.r < 1:
            raise ArgumentInvalid(f"`r`: expected an integer of at least 1, got {self.r!r}")
        if not _is_number(self.alpha) or self.alpha <= 0:
            raise ArgumentInvalid(f"`alpha`: expected a number above 0, got {self.alpha!r}")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ArgumentInvalid(f"`dropout`: expected a number from 0 to below 1, got {self.dropout!r}")
        if self.bias not in ("none", "all", "lora_only"):
            raise ArgumentInvalid(f"`bias`: expected 'none', 'all' or 'lora_only', got {self.bias!r}")
        for pattern, _ in self.alphas:
            as_glob(pattern)

    def scaling(self, path: str, r: int) -> float:
        """Return the factor of the change of the layer at `path`, of rank `r`."""
        own = (alpha for pattern, alpha in self.alphas if fnmatch.fnmatchcase(f".{path}", as_glob(pattern)))
        alpha = next(own, self.alpha)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


_TOKEN = r"\.\*|\\[-.d]|\[(?:\w-\w|\w)+\]|[-.\w]"
_PATTERN = re.compile(rf"\^?(?:{_TOKEN})+")
_GLOBS = {".*": "*", ".": "?", r"\d": "[0-9]", r"\.": ".", r"\-": "-"}


def as_glob(pattern: str) -> str:
    r"""Return a pattern of peft as one of `fnmatch` for paths behind a dot, whose time grows with their lengths alone.

    Args:
        pattern: a path or its end, or a regular expression of letters, digits, `_`, `-`, `.`, `\.`, `\d`, `[0-3]` and
            `.*`; with `^` at its begin it is that of whole paths.

    Raises:
        ArgumentInvalid: it is another regular expression.
    """
    if not _PATTERN.fullmatch(pattern):
        raise ArgumentInvalid(
            f"`alpha_pattern`: {pattern[:80]!r} is no path of layers, and of regular expressions only `.`, `\\.`, "
            "`\\d`, `.*`, `[0-3]` and `^` at the begin are read. Write the paths of the layers one by one"
        )
    glob = re.sub(_TOKEN, lambda token: _GLOBS.get(token[0], token[0]), pattern.removeprefix("^"))
    return f".{glob}" if pattern.startswith("^") else f"*.{glob}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and abs(value) <= _MOST


_MOST = 1e30
"""The greatest `alpha`: what it scales stays finite."""


CONFIG_FILE = "adapter_config.json"
LIMITS = Limits(json_nbytes=1 << 24, json_containers=1 << 16)
"""How large the file may be."""
_KNOWN = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size"),
        *("rank_pattern", "revision", "target_modules", "target_parameters", "task_type"),
    )
)
"""Settings that say which layers an adapter is for, or how its training began: its tensors say it too."""
_BEGUN = (True, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights under an adapter as they are."""
_Name = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Settings(msgspec.Struct):
    """Settings that change what is computed."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Meta(ge=1, le=1 << 31)] = 8
    lora_alpha: Annotated[int, Meta(gt=0, le=1 << 62)] | Annotated[float, Meta(gt=0)] = 8
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool | None = False
    use_dora: bool | None = False
    bias: Bias = "none"
    modules_to_save: Annotated[list[_Name], Meta(max_length=256)] | None = None
    alpha_pattern: Annotated[dict[_Name, Annotated[float, Meta(gt=0)]], Meta(max_length=1024)] | None = None


def config_record(config: LoraConfig, targets: Sequence[Target], base: str) -> dict[str, Any]:
    """Return peft's settings of an adapter of these weights; `base` is the model's name."""
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
    computed = _KNOWN.union(_Settings.__struct_fields__)
    for name, value in record.items():
        if value and (value not in _BEGUN if name == "init_lora_weights" else name not in computed):
            raise NotSupported(f"{path}: `{name[:80]}` is {str(value)[:80]}, which loaded bundles do not compute")
    try:
        settings = msgspec.convert(record, _Settings)
        return LoraConfig(
            r=settings.r,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            use_rslora=bool(settings.use_rslora),
            use_dora=bool(settings.use_dora),
            bias=settings.bias,
            modules_to_save=tuple(settings.modules_to_save or ()),
            alphas=tuple((settings.alpha_pattern or {}).items()),
        )
    except (msgspec.ValidationError, ArgumentInvalid) as error:
        raise ArgumentInvalid(f"{path}: {str(error)[:300]}") from None
