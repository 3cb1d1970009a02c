"""Settings of an adapter, by the names that peft gives them."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from aotexport_runtime.errors import ArgumentInvalid

Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of an adapter.

    Attributes:
        r: rank.
        alpha: numerator of the scaling: a change is scaled by `alpha / r`.
        dropout: probability of dropout of an adapter's input.
        use_rslora: scale by `alpha / sqrt(r)`.
        use_dora: learn the magnitude of a weight's rows apart from their direction.
        bias: biases that are trained: none, those of adapted layers, or all.
        modules_to_save: paths of modules that are trained whole and saved with the adapter.
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
        """Check the values.

        Raises:
            ArgumentInvalid: one is out of its range.
        """
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
