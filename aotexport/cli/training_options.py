"""The options of `aotexport finetune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

_EACH = {"r": int, "alpha": float, "dropout": float, "rslora": bool, "dora": bool}


class _LoraOption(click.ParamType):
    name = "r=8,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the options of an adapter, by name."""
        found: dict[str, Any] = {}
        for part in value.split(",") if isinstance(value, str) else ():
            key, _, text = part.partition("=")
            if key not in _EACH:
                self.fail(f"no option {key!r} of an adapter; there are {', '.join(_EACH)}", param, ctx)
            try:
                found[key] = True if _EACH[key] is bool and not text else _EACH[key](text)
            except ValueError:
                self.fail(f"{key}: expected a number, got {text!r}", param, ctx)
        return found if isinstance(value, str) else value


def _columns(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = [value.partition("=") for value in values]
    wrong = next((value for value, pair in zip(values, pairs, strict=True) if not pair[0] or not pair[2]), None)
    if wrong is not None:
        raise click.BadParameter(f"expected INPUT=COLUMN, got {wrong!r}", ctx, param)
    return tuple((name, column) for name, _, column in pairs)


_OPTIONS: Sequence[Callable[..., Any]] = (
    click.option(
        "--data",
        required=True,
        metavar="DATA",
        help="digits (of scikit-learn); a .parquet, .jsonl or .txt file; or a directory of the library datasets.",
    ),
    click.option(
        "-o",
        "--output",
        required=True,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="What to write: the tuned bundle; with --lora the adapter, in peft's files.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["classification", "causal-lm", "pairs"]),
        default="classification",
        show_default=True,
        help="classification: rows of inputs with a class. causal-lm: text, each token from those before it. pairs: "
        "two texts that belong together, against others of the batch. A bundle that takes `labels` computes its own.",
    ),
    click.option(
        "--lora",
        type=_LoraOption(),
        help="Train a LoRA adapter beside frozen weights: r=8,alpha=16,dropout=0.1,rslora,dora. [default: all weights]",
    ),
    click.option(
        "--layers",
        multiple=True,
        metavar="PATTERN",
        help="Layers that get an adapter: query, '*.fc1'; repeatable. [default: all linear]",
    ),
    click.option(
        "--whole",
        multiple=True,
        metavar="PATH",
        help="Layers to train whole beside the adapter, as a new head; repeatable.",
    ),
    click.option("--merge", is_flag=True, help="Merge the adapter into the weights, and write a bundle."),
    click.option(
        "--freeze",
        multiple=True,
        metavar="PATTERN",
        help="Parameters that stay as they are, by name: 'encoder.*'; repeatable.",
    ),
    click.option(
        "--epochs", type=click.IntRange(1), default=3, show_default=True, help="How often each example is seen."
    ),
    click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Examples of a step."),
    click.option(
        "--lr",
        type=click.FloatRange(0, min_open=True),
        help="Greatest learning rate of AdamW. [default: 1e-4; with --lora 1e-3]",
    ),
    click.option(
        "--schedule",
        type=click.Choice(["cosine", "linear", "constant"]),
        default="cosine",
        show_default=True,
        help="How the rate falls.",
    ),
    click.option(
        "--warmup",
        type=click.FloatRange(0, 1),
        default=0.05,
        show_default=True,
        help="Part of the steps in which it rises first.",
    ),
    click.option("--weight-decay", type=click.FloatRange(0), default=0.01, show_default=True, help="Of AdamW."),
    click.option(
        "--clip",
        type=click.FloatRange(0),
        default=1.0,
        show_default=True,
        help="Greatest norm of the gradient; 0: any.",
    ),
    click.option(
        "--validation",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.1,
        show_default=True,
        help="Part of the examples to hold out, and to measure after each epoch.",
    ),
    click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same curve."
    ),
    click.option("--tokenizer", metavar="FILE", help="tokenizer.json of the model, for text; bytes: its bytes."),
    click.option(
        "--length",
        type=click.IntRange(2),
        default=128,
        show_default=True,
        help="Most tokens of a text, where the bundle does not fix it.",
    ),
    click.option(
        "--column",
        "columns",
        multiple=True,
        callback=_columns,
        metavar="INPUT=COLUMN",
        help="The data's column of an input (or of text); repeatable. [default: that of its name]",
    ),
    click.option("--target", metavar="COLUMN", help="The column of classes. [default: label, labels, target or class]"),
    click.option("--result", metavar="OUTPUT", help="The output that the loss reads. [default: the one that fits]"),
    click.option("--device", default="cpu", show_default=True, help="Where to train: cpu, cuda."),
    click.option(
        "--run",
        "directory",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where to keep the checkpoint, history.jsonl and curves.png. [default: the output's name with .run]",
    ),
    click.option(
        "--checkpoint-every",
        "every",
        type=click.IntRange(0),
        default=0,
        metavar="STEPS",
        help="Also write a checkpoint after so many steps, beside those of every epoch and of Ctrl-C.",
    ),
    click.option("--resume", "resumes", is_flag=True, help="Go on with the run that was interrupted."),
    click.option("--tensorboard", is_flag=True, help="Write TensorBoard events to the directory of the run too."),
    click.option("--force", is_flag=True, help="Replace what is at the output, and an interrupted run."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors alone."),
    click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON."),
)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
