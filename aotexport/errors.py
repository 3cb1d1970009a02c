"""The errors of an export, by who can mend them."""

from __future__ import annotations

from aotexport_runtime.errors import AotExportError


class ModelFileInvalid(AotExportError):
    """The model file, or a command-line argument about it, is missing something or wrong.

    Way out: the message says what to write, most often the line itself.
    """

    exit_code = 2


class ExportFailed(AotExportError):
    """The model cannot be exported: an operator or construct, named with the user's source line.

    Way out: the message has it, for that line. The page on troubleshooting lists the usual ones.
    """

    @property
    def error(self) -> Exception:
        """The original error: this one, or torch's or the model's for an `AttemptFailed`."""
        return self


class AttemptFailed(ExportFailed):
    """Torch or the model's own code failed at an attempt; the export may go on without it.

    Way out: that of the error that was raised.
    """

    def __init__(self, message: str, error: Exception) -> None:
        self._error = error
        super().__init__(message)

    @property
    def error(self) -> Exception:
        """The error that torch or the model's code raised."""
        return self._error


class InternalError(AotExportError):
    """Aotexport has a bug, to report with the versions in the message. `__cause__` is the original error.

    Way out: written otherwise, the line of the model that the message names may pass.
    """

    exit_code = 3


class VerificationFailed(AotExportError):
    """The written bundle disagrees with eager execution; nothing was left behind.

    Way out: make the model repeatable (seeds, clocks, state outside of tensors); otherwise please report it.

    Attributes:
        report: one line per compared value that differs.
    """

    def __init__(self, message: str, report: list[str]) -> None:
        self.report = report
        super().__init__(message)
