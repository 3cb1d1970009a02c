"""The errors of the runtime, by who can mend them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

Result = TypeVar("Result")


class AotExportError(Exception):
    """Base of every error of aotexport and its runtime.

    Attributes:
        exit_code: of a command that it ends: 2 for wrong usage, which has to be mended, 1 for others.
    """

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """Return the message; a terminal obeys nothing in it that a bundle says."""
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return text with control characters as escapes; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the next if it ends at a colon, at most 300 characters."""
    first, second, *_ = *(line.strip() for line in str(error).splitlines() if line.strip()), "", ""
    return (f"{first} {second}" if first.endswith(":") else first)[:300]


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Return the first of some texts in a row, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def attempt(run: Callable[[], Result]) -> Result | Exception:
    """Return what `run` returns, or the error that it raises, for one who goes on and tells of any error."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - given to the caller
        return error


class Place(str):
    """A place in a bundle: a file, which is the text of it, and a JSON path in that file.

    As a context it names the place of a fault, and where faults are collected it goes on behind its block.

    Attributes:
        steps: keys and indices from the top of the file.
        faults: where faults are collected; None: the first is raised.
    """

    __slots__ = ("faults", "steps")

    steps: tuple[str | int, ...]
    faults: list[BundleInvalid] | None

    def __new__(cls, file: str, steps: tuple[str | int, ...] = (), faults: list[BundleInvalid] | None = None) -> Place:
        """Return the place; `file` may be a place, which is then taken as it is."""
        if isinstance(file, Place):
            return file
        place = super().__new__(cls, file)
        place.steps, place.faults = steps, faults
        return place

    def at(self, *steps: str | int) -> Place:
        """Return the place that these keys and indices lead to from here."""
        place = str.__new__(Place, self)
        place.steps, place.faults = (*self.steps, *steps), self.faults
        return place

    @property
    def path(self) -> str:
        """The JSON path: `$.nodes[3].args[0]`."""
        return "$" + "".join(map(_step, self.steps))

    @property
    def found(self) -> int:
        """How many faults were collected so far."""
        return len(self.faults or ())

    def invalid(self, message: str, check: str) -> BundleInvalid:
        """Return the error of a check that fails here, by its name in `schemas/v1/checks.json`."""
        return BundleInvalid(message, where=self, check=check)

    def require(self, fits: object, message: str, check: str) -> None:
        """Raise the error of a check, if it fails."""
        if not fits:
            raise self.invalid(message, check)

    def expect(self, fits: object, message: str, check: str) -> None:
        """Note that a check fails here, or raise it where faults are not collected, if it does."""
        if not fits:
            self.refuse(message, check)

    def refuse(self, message: str, check: str) -> None:
        """Note that a check fails here, or raise it where faults are not collected."""
        with self:
            raise self.invalid(message, check)

    def __enter__(self) -> Place:
        """Return the place itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep a fault where faults are collected."""
        if self.faults is None or not isinstance(error, BundleInvalid):
            return False
        self.faults.append(error)
        return True


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isidentifier() else f"[{step!r}]"


class BundleInvalid(AotExportError):
    """A bundle is broken, truncated, tampered with, hostile, or no bundle at all.

    Way out: that of its code (`python -m aotexport_runtime explain CODE`). Most often: copy the bundle again.

    Attributes:
        where: file inside the bundle, or its `Place`.
        check: which check of the format fails, by its name in `schemas/v1/checks.json`: `index-range/leaf`.
        code: the code of the check, what its name begins with.
        path: JSON path in the file; `$`: the file itself.
        reason: the message without the place.
    """

    def __init__(self, message: str, *, where: str = "", check: str) -> None:
        self.where = where
        self.check = check
        self.code = check.partition("/")[0]
        self.path = where.path if isinstance(where, Place) else "$"
        self.reason = message
        super().__init__(f"{where}: {message}" if where else message)
        # Of a traceback; messages stay as they are.
        self.add_note(f"`python -m aotexport_runtime explain {self.code}` tells cause and way out")


def coded(error: AotExportError) -> str:
    """Return the message for a terminal, with the code behind it, which `explain` takes, where there is one."""
    return f"{error} [{error.code}]" if isinstance(error, BundleInvalid) else str(error)


class BundleTooNew(BundleInvalid):
    """A bundle needs a newer reader than this runtime.

    Way out: install a newer `aotexport-runtime`, or export with an older exporter.

    Attributes:
        needed: format version that the bundle asks for, `(major, minor)`.
        supported: newest format version that this runtime reads.
    """

    def __init__(self, message: str, *, needed: tuple[int, int], supported: tuple[int, int]) -> None:
        self.needed = needed
        self.supported = supported
        super().__init__(message, where="bundle.json", check="version-newer/format")


class NotSupported(AotExportError):
    """The bundle is valid, and asks for something that this runtime, torch build or machine cannot do.

    Way out: the message names it: a package, a permission (`trust`, `operator_namespaces`), another target, or another
    export. `python -m aotexport_runtime doctor` says what the machine has.
    """


class ArgumentInvalid(AotExportError, TypeError):
    """An argument of a function or command is wrong.

    Way out: the message names the argument and what is expected.
    """

    exit_code = 2


class DataInvalid(AotExportError):
    """Data to train on cannot be read, or does not fit the bundle or the loss.

    Way out: the message names the file, the row or the column, and what is expected.
    """

    exit_code = 2


class TorchMissing(NotSupported, ModuleNotFoundError):
    """The request needs torch, which is not installed or too old.

    Way out: `pip install 'torch>=2.7'`. Reading and checking a bundle, and its ONNX models, do without.
    """


class NotWritten(AotExportError, OSError):
    """The file system cannot hold a bundle: full, over its quota, read-only, or the name is too long.

    Nothing was left behind, and a bundle that was to be replaced is as it was. Way out: make room, or another place.

    Attributes:
        errno: the system's number of the reason.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.errno = number


class HubFailed(AotExportError):
    """The Hugging Face Hub refuses what `push` or `pull` asks for, or cannot be reached; nothing was written.

    Way out: `hf auth login` for what needs rights, another name, or a try later. Without network (`HF_HUB_OFFLINE=1`)
    there is what was pulled before.
    """


class OutputExists(AotExportError):
    """Something is at the output and `force` was not given, or it is no bundle, or nothing can be written there.

    Way out: another place, or `force=True` (`--force`), which replaces bundles alone.
    """

    exit_code = 2


class CallInvalid(AotExportError, ValueError):
    """A call of a loaded bundle does not fit any program.

    Way out: pass what the lines of the message expect, or export with wider sizes (`--dynamic`) or with a variant.

    Attributes:
        violations: one sentence per violated guard, each naming the argument by its path in the call.
    """

    def __init__(self, program: str, violations: list[str]) -> None:
        self.program = program
        self.violations = violations
        lines = "\n".join(f"  - {violation}" for violation in violations)
        super().__init__(f"the call does not fit program `{program}`:\n{lines}")


class CheckFailed(AotExportError, RuntimeError):
    """A check that the program makes on values fails: `torch._check`, or a branch that the captured code took.

    Way out: call with values for which it holds, or export with an example of the other kind. Changes of arguments and
    state that were made before the check stay, as in eager execution.
    """


class SelfTestFailed(AotExportError):
    """A loaded bundle disagrees with the results that were recorded from eager execution.

    Way out: the release of torch and the device of the export, or an export here; otherwise please report it.
    """


class Overloaded(AotExportError):
    """A servable refuses a call, since as many wait already as may.

    Way out: call again later, or more workers (`--workers`).
    """


class DeadlinePassed(AotExportError, TimeoutError):
    """A call of a servable waited for longer than its caller allowed; it did not run.

    Way out: a longer deadline, or more workers.
    """
