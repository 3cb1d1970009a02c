"""What a run of fine-tuning was asked for; each setting with its option of the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import click

Loss = Literal[
    "classification", "multi-label", "regression", "token-classification", "causal-lm", "completion", "seq2seq", "pairs"
]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA adapter, see `aotexport_runtime.adapters.add_lora`.

    Attributes:
        targets: patterns of layers; empty: all linear ones.
        whole: layers that are trained whole beside it.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    targets: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


class _LoraOption(click.ParamType):
    name = "r=8,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the options of an adapter, by name."""
        kinds: dict[str, Any] = {each.name: type(each.default) for each in fields(Lora) if each.default != ()}
        found: dict[str, Any] = {}
        for part in value.split(",") if isinstance(value, str) else ():
            key, _, text = part.partition("=")
            if key not in kinds:
                self.fail(f"no option {key!r} of an adapter; there are {', '.join(kinds)}", param, ctx)
            try:
                found[key] = True if kinds[key] is bool and not text else kinds[key](text)
            except ValueError:
                self.fail(f"{key}: expected a number, got {text!r}", param, ctx)
        return found if isinstance(value, str) else value


class _Column(click.ParamType):
    name = "INPUT=COLUMN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name of the input, and of its column."""
        name, _, column = value.partition("=")
        if not name or not column:
            self.fail(f"expected INPUT=COLUMN, got {value!r}", param, ctx)
        return name, column


def _option(default: Any, text: str, **others: Any) -> Any:
    """Return a field with its option: what `--help` says, and further keywords of `click.option`."""
    return field(default=default, metadata={"help": text, **others})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the curve of a run, with the bundle and the data; each field has the help of its option."""

    loss: Loss = _option(  # noqa: RUF009 - a field
        "classification",
        "classification, multi-label: rows of inputs with a class, or several. regression: with numbers. "
        "token-classification: words with a class each. causal-lm: text, each token from those before it. completion: "
        "the answers of `messages`, or `completion` after `prompt`. seq2seq: a text that follows from another. pairs: "
        "two texts that belong together, against others of the batch. A bundle that takes `labels` computes its own.",
        type=click.Choice(get_args(Loss)),
    )
    freeze: tuple[str, ...] = _option(
        (), "Parameters that stay as they are, by name: 'encoder.*'; repeatable.", metavar="PATTERN"
    )
    epochs: int = _option(3, "How often each example is seen.", type=click.IntRange(1))
    batch_size: int = _option(32, "Examples of a call.", type=click.IntRange(1))
    accumulate: int = _option(
        1, "Calls whose gradients a step adds up, as if they were one batch.", type=click.IntRange(1)
    )
    autocast: Literal["bfloat16"] | None = _option(None, "Train in mixed precision.", type=click.Choice(["bfloat16"]))
    patience: int | None = _option(
        None,
        "End after so many epochs without a better loss of the examples held out.",
        type=click.IntRange(1),
        metavar="EPOCHS",
    )
    keep: Literal["best", "last"] = _option(
        "best",
        "The epoch whose weights are written: with the best loss of the examples held out, or the last.",
        type=click.Choice(["best", "last"]),
    )
    lr: float = _option(
        None,
        "Greatest learning rate of AdamW. [default: 1e-4; with --lora 1e-3]",
        type=click.FloatRange(0, min_open=True),
    )
    schedule: Schedule = _option(  # noqa: RUF009 - a field
        "cosine", "How the rate falls.", type=click.Choice(get_args(Schedule))
    )
    warmup: float = _option(0.05, "Part of the steps in which it rises first.", type=click.FloatRange(0, 1))
    weight_decay: float = _option(0.01, "Of AdamW.", type=click.FloatRange(0))
    clip: float = _option(1.0, "Greatest norm of the gradient; 0: any.", type=click.FloatRange(0))
    validation: float = _option(
        0.1,
        "Part of the examples to hold out, and to measure after each epoch.",
        type=click.FloatRange(0, 1, max_open=True),
    )
    seed: int = _option(0, "The same seed gives the same curve.", type=click.IntRange(0))
    length: int = _option(128, "Most tokens of a text, where the bundle does not fix it.", type=click.IntRange(2))
    pack: bool = _option(
        False,
        "Put rows of --loss completion behind one another, up to --length tokens, each with positions of its own, by "
        "which the bundle keeps them apart (--recipe causal-lm-packed).",
        is_flag=True,
    )
    columns: tuple[tuple[str, str], ...] = _option(
        (),
        "The data's column of an input (or of text); repeatable. [default: that of its name]",
        type=_Column(),
        flag="column",
    )
    target: str | None = _option(
        None, "The column of what to learn. [default: label, labels, target or class]", metavar="COLUMN"
    )
    result: str | None = _option(None, "The output that the loss reads. [default: the one that fits]", metavar="OUTPUT")
    step: bool = _option(
        False,
        "Make steps by the bundle's program `step`, with its optimizer, which `aotexport derive --step` adds.",
        is_flag=True,
    )
    lora: Lora | None = _option(  # noqa: RUF009 - a field
        None,
        "Train a LoRA adapter beside frozen weights: r=8,alpha=16,dropout=0.1,rslora,dora. [default: all weights]",
        type=_LoraOption(),
    )

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate after `step` of `steps` steps."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        part = (step - rising) / max(steps - rising, 1)
        falls = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "constant": 1.0}
        return self.lr * falls[self.schedule]
