"""A run of fine-tuning, from a bundle and data to a tuned bundle or an adapter."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from aotexport_runtime.adapters import add_lora
from aotexport_runtime.errors import DataInvalid, NotSupported, NotWritten
from aotexport_runtime.finetune import checkpoint, history
from aotexport_runtime.finetune.examples import Examples, examples_of
from aotexport_runtime.finetune.history import Entry, History
from aotexport_runtime.finetune.losses import Outcome, outcome
from aotexport_runtime.finetune.model import OWN_TARGET, Model
from aotexport_runtime.finetune.settings import Settings
from aotexport_runtime.finetune.table import Table, listed
from aotexport_runtime.module.bundle_module import BundleModule
from aotexport_runtime.module.stepper import Stepper


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run keeps what it needs to go on, and TensorBoard events.

    Attributes:
        every: steps between checkpoints; 0: only where it is interrupted, and after each epoch.
        resumes: go on with the run that was interrupted there.
    """

    directory: Path
    every: int = 0
    resumes: bool = False
    tensorboard: bool = False


@contextlib.contextmanager
def processes(device: str) -> Generator[None]:
    """Join the processes that `torchrun` has started in the block, each with a device of its own; else do nothing."""
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def prepare(module: BundleModule, settings: Settings) -> str:
    """Add the adapter, freeze what shall stay; return what is trained, for people.

    `ArgumentInvalid`: see `add_lora`. `DataInvalid`: a pattern matches no parameter, or nothing is left to train.
    `NotSupported`: see `add_lora`; or calls change attributes of the model, which a checkpoint does not hold.
    """
    if module.bundle.manifest.attributes:
        raise NotSupported(
            "calls change attributes of the model, which a checkpoint does not hold. Write the loop yourself"
        )
    torch.manual_seed(settings.seed)
    if settings.lora is not None:
        lora = settings.lora
        add_lora(
            module,
            list(lora.targets) or "all-linear",
            r=lora.r,
            alpha=lora.alpha,
            dropout=lora.dropout,
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            modules_to_save=lora.whole,
        )
    parameters = dict(module.named_parameters())
    for pattern in settings.freeze:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise DataInvalid(
                f"--freeze: {pattern!r} matches none of the parameters {listed(list(parameters)[:8])}, ..."
            )
        for name in names:
            parameters[name].requires_grad_(False)
    own = sum(p.numel() for p in parameters.values() if p.requires_grad)
    if not own:
        raise DataInvalid("nothing is left to train; leave some parameters out of --freeze, or add an adapter (--lora)")
    return f"{own:,} of {sum(p.numel() for p in parameters.values()):,} parameters"


class Run:
    """The loop: order of the examples, steps, checkpoints. The same seed gives the same curve, interrupted or not.

    Processes of a group share the calls of a step, and the first keeps the run; the curve is that of one process.

    Attributes:
        step: number of steps that are done.
        classes: names of the classes, where the data names them.
        examples: number of examples that are trained on.
        held_out: number of those that are not.
        notes: what differs from what was asked for, for people.
    """

    def __init__(
        self, module: BundleModule, table: Table, settings: Settings, tokenizer: str | None, place: Place
    ) -> None:
        """Make examples for a prepared bundle, which changes in place, and go back to where an interrupted run was.

        Every process of a group calls this.

        `DataInvalid`: the data does not fit, or there is no such run to go on with. `NotSupported`: see `Model`.
        `NotWritten`: nothing can be written to the directory.
        """
        if settings.pack and settings.loss != "completion":
            raise DataInvalid(f"--pack packs the rows of --loss completion, and not those of {settings.loss}")
        validates = bool(settings.validation) or table.held_out is not None
        self._model = Model(module, validates=validates, packed=settings.pack)
        self._settings, self._place = settings, place
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._file, self._best_file = place.directory / checkpoint.FILE, place.directory / checkpoint.BEST
        self._training, self._validation = examples_of(table, self._model, settings, tokenizer)
        self.notes, self.classes = self._training.notes, self._training.classes
        self._device = next(module.parameters()).device
        self._batches = len(self._steps(0))
        self.examples, self.held_out = len(self._training), len(self._validation)
        self.steps = self._batches * settings.epochs
        self._check_sizes()
        if settings.accumulate < self._ranks:
            raise DataInvalid(
                f"--accumulate: {self._ranks} processes share the calls of a step, and it has {settings.accumulate}. "
                f"Give {self._ranks}, or a multiple"
            )
        if settings.patience is not None and not self.held_out:
            raise DataInvalid("--patience waits for a better loss of examples held out, and none are: --validation")
        # Adapters begin with random numbers, and the base of all that follows is the bundle.
        self._identity = checkpoint.Identity.of(module, settings, self.examples)
        self._optimizer = self._made()
        try:
            place.directory.mkdir(parents=True, exist_ok=True)
            self.step = 0
            if place.resumes:
                self.step = checkpoint.read(self._file, module, self._optimizer, self._identity, self.steps)
            self.history = History(place.directory, steps=self.step, writes=False)
            self._wait()
            if not self._rank:
                self.history = History(place.directory, steps=self.step, tensorboard=place.tensorboard)
        except OSError as error:
            raise NotWritten(f"the run cannot be kept in {place.directory}: {error}", error.errno or 0) from None

    def _made(self) -> torch.optim.Optimizer:
        """Return the optimizer, or what makes whole steps by the bundle's."""
        settings, module = self._settings, self._model.module
        if not settings.step:
            parameters = checkpoint.trained(module).values()
            return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
        asked = {
            "--lora": settings.lora,
            "--freeze": settings.freeze,
            "--autocast": settings.autocast,
            "--weight-decay": settings.weight_decay != Settings.weight_decay,
            "several processes": self._ranks > 1,
        }
        if found := next((name for name, given in asked.items() if given), None):
            raise DataInvalid(
                f"--step: {found}: the bundle's program is fixed. Give that to `aotexport derive`, or leave --step out"
            )
        if OWN_TARGET not in self._model.inputs:
            raise DataInvalid(f"--step: the bundle takes no `{OWN_TARGET}`, by which a step computes its loss")
        return module.stepper(lr=settings.lr, max_norm=settings.clip or None)

    @property
    def best(self) -> int | None:
        """The epoch with the best loss of the examples held out, from 1; None: there is none yet."""
        losses = [entry["validation_loss"] for entry in self.history.epochs if "validation_loss" in entry]
        return losses.index(min(losses)) + 1 if losses else None

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or the loss of the examples held out has not become better for long."""
        epochs, patience = len(self.history.epochs), self._settings.patience
        waited = self.best is not None and patience is not None and epochs - self.best >= patience
        return self.step == self.steps or (waited and self.step == epochs * self._batches)

    def train(self, told: Callable[[Entry], None], stops: Callable[[], bool]) -> None:
        """Run the steps that are missing, and go back to the weights of the best epoch where these are kept.

        `told` is called with every entry of the history. `stops` is asked after each step; True: write a checkpoint and
        return. `DataInvalid`: the loss is no finite number, or an output does not fit the loss. `NotWritten`: the file
        system is full, read-only, or otherwise refuses. `NotSupported`: calls in several processes change buffers.
        """

        def all_stop() -> bool:
            return bool(self._summed(float(stops())))

        try:
            while not self.finished and not all_stop():
                self._epoch(self.step // self._batches, told, all_stop)
        finally:
            self.history.close()
        if not self.finished:
            self._write(self._file)
            return
        if self._keeps_best and self.best != len(self.history.epochs):
            checkpoint.read(self._best_file, self._model.module, self._optimizer, self._identity, self.steps)
        self._wait()
        for file in () if self._rank else (self._file, self._best_file):
            file.unlink(missing_ok=True)

    def picture(self, title: str) -> Path | None:
        """Draw the curves; return the file, or None if matplotlib is not installed."""
        path = self._place.directory / history.PICTURE
        return path if history.draw(self.history.entries, path, title) else None

    def _epoch(self, epoch: int, told: Callable[[Entry], None], stops: Callable[[], bool]) -> None:
        self._model.module.train()
        done = self.step % self._batches
        for batches in self._steps(epoch)[done:]:
            self._tell(self._step(batches), told)
            if self._place.every and self.step % self._place.every == 0 and self.step % self._batches:
                self._write(self._file)
            if stops() and self.step % self._batches:
                return
        self._tell(self._summary(epoch), told)
        if self._keeps_best and self.best == epoch + 1:
            self._write(self._best_file)
        self._write(self._file)

    @property
    def _keeps_best(self) -> bool:
        return self._settings.keep == "best" and len(self._validation) > 0 and self._settings.epochs > 1

    def _step(self, batches: list[list[int]]) -> Entry:
        """Run one step, the mean over the targets of its batches; return its entry."""
        began, rate = time.monotonic(), self._settings.rate(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        parameters = self._optimizer.param_groups[0]["params"]
        value = self._summed(sum(self._called(batches)))
        if not math.isfinite(value):
            found = self._training.not_finite([row for rows in batches for row in rows])
            why = found or "; try a lower --lr, or look at the data"
            raise DataInvalid(f"the loss is {value} at step {self.step + 1}{why}")
        for gradient in (p.grad for p in parameters if p.grad is not None and self._ranks > 1):
            dist.all_reduce(gradient)
        if not self._settings.step:
            if self._settings.clip:
                torch.nn.utils.clip_grad_norm_(parameters, self._settings.clip)
            self._optimizer.step()
        self.step += 1
        speed = sum(map(len, batches)) / (time.monotonic() - began)
        return {"step": self.step, "loss": value, "lr": rate, "examples_per_s": round(speed, 2)}

    def _called(self, batches: list[list[int]]) -> Iterator[float]:
        """Call this process's share of the batches, and yield the part that each has of the loss and the gradients."""
        weights, buffers = [*map(self._training.weight, batches)], [*self._model.module.buffers()]
        before = [each._version for each in buffers]
        # Where there are fewer batches than processes, a gradient of zero is none that is missing.
        for number in range(self._rank, max(len(batches), self._rank + 1), self._ranks):
            own = number if number < len(batches) else 0
            # Of the call alone: a run that goes on, or has more processes, draws what it would have drawn.
            torch.manual_seed(hash((self._settings.seed, self.step, own)))
            part = weights[own] / sum(weights) * (number < len(batches))
            if isinstance(self._optimizer, Stepper) and own == len(batches) - 1:
                self._optimizer.scale = part
                args, kwargs = self._model.arguments(self._training.batch(batches[own], self._device))
                found = self._optimizer(*args, **kwargs)
                yield (found if isinstance(found, torch.Tensor) else found[0]).item() * part
                continue
            loss = self._outcome(self._training, batches[own]).loss * part
            loss.backward()
            yield loss.item()
        if self._ranks > 1 and before != [each._version for each in buffers]:
            raise NotSupported("calls change buffers, as batch norms do, by the examples of one process: use one")

    def _summed(self, value: float) -> float:
        """Return the sum over the processes."""
        if self._ranks == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return total.item()

    def _wait(self) -> None:
        """Wait for every process."""
        self._summed(0.0)

    def _summary(self, epoch: int) -> Entry:
        own = [e["loss"] for e in self.history.entries if "loss" in e and e["step"] > self.step - self._batches]
        entry: Entry = {"step": self.step, "epoch": epoch + 1, "train_loss": sum(own) / len(own)}
        if len(self._validation):
            entry.update(self._validated())
        return entry

    @torch.no_grad()
    def _validated(self) -> Entry:
        """Return the loss of the examples that are held out, and what people read beside it."""
        module = self._model.module.eval()
        total, number, right, answers = 0.0, 0, 0, 0
        for rows in [*self._batched(list(range(len(self._validation))))][self._rank :: self._ranks]:
            found, weight = self._outcome(self._validation, rows), self._validation.weight(rows)
            total, number = total + found.loss.item() * weight, number + weight
            right, answers = right + found.right, answers + found.answers
        module.train()
        total, number, right, answers = map(self._summed, (total, number, right, answers))
        if not number:
            raise DataInvalid(f"{len(self._validation)} examples are held out, less than a batch: --validation")
        mean = total / number
        extra = {"accuracy": right / answers} if answers else {}
        if self._settings.loss in ("causal-lm", "completion", "seq2seq"):
            extra = {"perplexity": math.exp(min(mean, 700))}
        return {"validation_loss": mean, **extra}

    def _outcome(self, examples: Examples, rows: list[int]) -> Outcome:
        batch, dtype = examples.batch(rows, self._device), torch.bfloat16
        with torch.autocast(self._device.type, dtype, enabled=self._settings.autocast is not None):
            return outcome(self._model, batch, self._settings)

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        """Return the examples of each batch of each step of an epoch, in an order that seed and epoch decide."""
        generator = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        batches = list(self._batched(torch.randperm(len(self._training), generator=generator).tolist()))
        return [batches[i : i + self._settings.accumulate] for i in range(0, len(batches), self._settings.accumulate)]

    def _batched(self, order: list[int]) -> Iterator[list[int]]:
        """Return batches; a last one that is too small for the bundle, or has no other pair, is left out."""
        size, least = self._settings.batch_size, self._model.sizes[0]
        least = max(least, 2) if self._settings.loss == "pairs" else least
        return (order[i : i + size] for i in range(0, len(order), size) if len(order) - i >= min(least, size))

    def _check_sizes(self) -> None:
        least, most = self._model.sizes
        size = self._settings.batch_size
        if size < least or (most is not None and size > most):
            bounds = f"{least}" if least == most else f"{least} to {'any' if most is None else most}"
            raise DataInvalid(f"--batch-size: the bundle takes {bounds} examples in a call, got {size}")
        if not self._batches:
            raise DataInvalid(f"{len(self._training)} examples are less than a batch of the bundle ({least})")

    def _tell(self, entry: Entry, told: Callable[[Entry], None]) -> None:
        self.history.add(entry)
        told(entry)

    def _write(self, file: Path) -> None:
        if not self._rank:
            checkpoint.write(file, self._model.module, self._optimizer, self._identity, self.step)
