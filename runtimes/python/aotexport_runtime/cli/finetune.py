"""`finetune bundle/ --data ... -o tuned/`: train a bundle on a user's data."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from aotexport_runtime.cli.output import BUNDLE, begin, columns, print_json, printed_elsewhere
from aotexport_runtime.finetune.progress import TrainingProgress, epochs_table
from aotexport_runtime.finetune.settings import Lora, Settings

if TYPE_CHECKING:
    from aotexport_runtime.finetune.run import Place, Run
    from aotexport_runtime.module.bundle_module import BundleModule

_EXAMPLE = """\b
Examples:
  a classifier of images, on the digits that scikit-learn has
    aotexport finetune net/ --data digits --lr 1e-2 --epochs 5 -o tuned/
  a language model, on text, by a LoRA adapter in peft's files
    aotexport finetune gpt2/ --data book.txt --loss causal-lm --tokenizer tokenizer.json --lora r=8 -o adapter/
  a language model that answers, on conversations, cut at 1024 tokens
    aotexport finetune chat/ --data chats.jsonl --loss completion --tokenizer tokenizer/ --length 1024 -o tuned/
  an encoder of sentences, on pairs that mean the same, merged into one bundle
    aotexport finetune minilm/ --data pairs.jsonl --loss pairs --tokenizer tokenizer.json --lora r=8 --merge -o tuned/
\b
Ctrl-C finishes the step and keeps a checkpoint; the same command with --resume goes on, with the same curve as if
nothing had happened. `torchrun --nproc-per-node 2 -m aotexport finetune ... --accumulate 2` shares the calls of a step.
"""
_INTERRUPTED = 130


def _setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(fields(Settings)):
        others, default = dict(setting.metadata), setting.default
        flag = others.pop("flag", setting.name.replace("_", "-"))
        others |= {"default": default, "multiple": default == (), "show_default": default not in (None, ())}
        command = click.option(f"--{flag}", setting.name, **others)(command)
    return command


@click.command(short_help="Train a bundle on data of your own.", epilog=_EXAMPLE)
@BUNDLE
@click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="digits (of scikit-learn); a .parquet, .jsonl, .csv or .txt file; or a directory of the library datasets.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="What to write: the tuned bundle; with --lora the adapter, in peft's files.",
)
@_setting_options
@click.option(
    "--layers",
    multiple=True,
    metavar="PATTERN",
    help="Layers that get an adapter: query, 'encoder.*'; repeatable. [default: all linear]",
)
@click.option(
    "--whole",
    multiple=True,
    metavar="PATH",
    help="Layers to train whole beside the adapter, as a new head; repeatable.",
)
@click.option("--merge", is_flag=True, help="Merge the adapter into the weights, and write a bundle.")
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="The model's tokenizer, for text: the directory that transformers wrote, which has the chat template too, or "
    "tokenizer.json; bytes: the bytes of the text.",
)
@click.option("--device", default="cpu", show_default=True, help="Where to train: cpu, cuda.")
@click.option(
    "--run",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to keep the checkpoint, history.jsonl and curves.png. [default: the output's name with .run]",
)
@click.option(
    "--checkpoint-every",
    "every",
    type=click.IntRange(0),
    default=0,
    metavar="STEPS",
    help="Also write a checkpoint after so many steps, beside those of every epoch and of Ctrl-C.",
)
@click.option("--resume", "resumes", is_flag=True, help="Go on with the run that was interrupted.")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard events to the directory of the run too.")
@click.option("--force", is_flag=True, help="Replace what is at the output, and an interrupted run.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def finetune(ctx: click.Context, bundle: Path, data: str, output: Path, **options: Any) -> None:
    """Train BUNDLE on DATA, and write a tuned bundle or an adapter; the model's code is not needed.

    A step reads a batch, computes the loss and its gradients from the bundle's graphs, and updates what is trained by
    AdamW. Curves of loss and accuracy are drawn to curves.png, and are in history.jsonl.
    """
    settings = _settings(options)
    merges, force, others = options["merge"], options["force"], int(os.environ.get("RANK", "0")) > 0
    quiet = options["quiet"] or others
    kind = "bundle" if settings.lora is None or merges else "adapter"
    with printed_elsewhere(options["as_json"]), contextlib.ExitStack() as group:
        tell = functools.partial(begin, quiet=quiet)
        tell("import torch")
        from aotexport_runtime.finetune.run import Place, processes

        place = Place(
            directory=options["directory"] or output.with_name(output.name + ".run"),
            every=options["every"],
            resumes=options["resumes"],
            tensorboard=options["tensorboard"],
        )
        group.enter_context(processes(options["device"]))
        _check_place(output, place, force=force, kind=kind)
        module, run, trained = _prepared(bundle, data, settings, place, options, tell)
        for note in () if quiet else run.notes:
            _say(f"note: {note}")
        shown = TrainingProgress(quiet=quiet, steps=run.steps, epochs=settings.epochs, done=run.step)
        with shown, _interrupts() as stops:
            shown.begin(f"train {trained} on {run.examples:,} examples, {run.held_out:,} held out")
            run.train(shown.told, stops)
        if not run.finished:
            if not others:
                _say(f"interrupted after step {run.step} of {run.steps}; the same command with --resume goes on")
            ctx.exit(_INTERRUPTED)
        if others:
            return
        _write(module, output, settings, merges=merges, force=force)
        drawn = run.picture(f"{bundle.name}: {settings.loss} on {Path(data).name}")
    summary = _summary(run, output, drawn, place, kind)
    if options["as_json"]:
        print_json(summary)
    elif not quiet:
        _print(summary)


def _prepared(
    bundle: Path, data: str, settings: Settings, place: Place, options: dict[str, Any], tell: Callable[[str], None]
) -> tuple[BundleModule, Run, str]:
    """Return the loaded bundle, its run, and what is trained, for people."""
    from aotexport_runtime.finetune.run import Run, prepare
    from aotexport_runtime.finetune.table import read_table
    from aotexport_runtime.ranks import load

    tell(f"read {data}")
    table = read_table(data)
    tell(f"load {bundle}")
    module = load(bundle, device=None if options["device"] == "cpu" else options["device"])
    trained = prepare(module, settings)
    return module, Run(module, table, settings, options["tokenizer"], place), trained


def _settings(options: dict[str, Any]) -> Settings:
    given = {each.name: options[each.name] for each in fields(Settings)}
    lora, given["lr"] = given["lora"], given["lr"] or (1e-4 if given["lora"] is None else 1e-3)
    if lora is not None:
        given["lora"] = Lora(**lora, targets=options["layers"], whole=options["whole"])
    elif options["layers"] or options["whole"]:
        raise click.UsageError("--layers and --whole belong to an adapter; give --lora too")
    elif options["merge"]:
        raise click.UsageError("--merge merges an adapter; give --lora too")
    return Settings(**given)


def _check_place(output: Path, place: Place, *, force: bool, kind: str) -> None:
    """Refuse before the work what could not be written after it."""
    from aotexport_runtime.adapters.config import CONFIG_FILE
    from aotexport_runtime.bundle.staging import why_not_written
    from aotexport_runtime.errors import OutputExists
    from aotexport_runtime.finetune.checkpoint import FILE

    if kind == "adapter" and (output / CONFIG_FILE).exists() and not force:
        raise OutputExists(f"`{output}` holds an adapter; give --force to replace it, or choose another place")
    if kind == "bundle" and (reason := why_not_written(output, force=force)):
        raise OutputExists(reason)
    if (place.directory / FILE).exists() and not (place.resumes or force):
        raise OutputExists(f"`{place.directory}` has an interrupted run; --resume goes on, --force begins anew")


@contextlib.contextmanager
def _interrupts() -> Generator[Callable[[], bool]]:
    """Yield whether Ctrl-C or SIGTERM came in the block: the first waits for the end of the step."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)
        _say("finishing the step; once more ends at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(message: str) -> None:
    click.echo(message, err=True)


def _write(module: BundleModule, output: Path, settings: Settings, *, merges: bool, force: bool) -> None:
    from aotexport_runtime.adapters import merge_adapter, save_adapter
    from aotexport_runtime.commands.saving import save

    if settings.lora is not None and not merges:
        save_adapter(module, output, force=force)
        return
    if merges:
        merge_adapter(module)
    save(module, output, force=force)


def _summary(run: Run, output: Path, drawn: Path | None, place: Place, kind: str) -> dict[str, Any]:
    return {
        "output": str(output),
        "kind": kind,
        "steps": run.steps,
        "epochs": run.history.epochs,
        "best": run.best,
        "classes": list(run.classes),
        "run": str(place.directory),
        "curves": None if drawn is None else str(drawn),
    }


def _print(summary: dict[str, Any]) -> None:
    click.echo("\n".join(columns(epochs_table(summary["epochs"]), str.rjust)))
    click.echo(f"wrote the {summary['kind']} {summary['output']}")
    if summary["classes"]:
        click.echo(f"classes, in the order of the outputs: {', '.join(summary['classes'])}")
    curves = summary["curves"] or "none drawn, since matplotlib is not installed"
    click.echo(f"curves: {curves}; history: {summary['run']}")
