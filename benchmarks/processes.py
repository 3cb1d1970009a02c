"""The measured processes, seen from the one that drives them: each gives a sample when asked, and rests in between."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.meters import wall_s

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_S = 1800.0


class NotMeasured(Exception):
    """A figure cannot be measured; the message says why, in one line."""


class Source(Protocol):
    """Where samples come from."""

    def sample(self) -> dict[str, Any]:
        """Return the next sample.

        Raises:
            NotMeasured: there is none.
        """
        ...

    def close(self) -> None:
        """Give up what the source holds."""
        ...


class Worker:
    """A process that stays: it has built and run its system once, and runs a round per sample.

    Attributes:
        first: times and results of the first execution.
    """

    def __init__(self, spec: dict[str, Any], threads: int) -> None:
        """Start the process and wait until it is ready.

        Raises:
            NotMeasured: it failed.
        """
        self._errors = _errors()
        self._process = _spawn("benchmarks.worker", {**spec, "threads": threads}, threads, self._errors)
        try:
            self.first = _answer(self._process, self._errors)
        except BaseException:
            self.close()
            raise

    def sample(self) -> dict[str, Any]:
        """Run a round."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"round\n")
            self._process.stdin.flush()
        return _answer(self._process, self._errors)

    def close(self) -> None:
        """End the process."""
        _end(self._process)
        self._errors.close()


class Fresh:
    """A new process per sample."""

    def __init__(self, spec: dict[str, Any], threads: int) -> None:
        self._spec = spec
        self._threads = threads

    def sample(self) -> dict[str, Any]:
        """Start a process and wait for its answer."""
        spec = {**self._spec, "threads": self._threads, "spawned_s": wall_s()}
        with _errors() as errors:
            process = _spawn("benchmarks.fresh", spec, self._threads, errors)
            try:
                return _answer(process, errors)
            finally:
                _end(process)

    def close(self) -> None:
        """Nothing is held between samples."""


def _errors() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _spawn(module: str, spec: dict[str, Any], threads: int, errors: IO[str]) -> subprocess.Popen[bytes]:
    pools = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        bufsize=0,
        cwd=_ROOT,
        env={**os.environ, **pools, "HF_HUB_OFFLINE": "1"},
    )


def _answer(process: subprocess.Popen[bytes], errors: IO[str]) -> dict[str, Any]:
    """Return the next line of the process."""
    assert process.stdout is not None
    line = bytearray()
    deadline = wall_s() + _PATIENCE_S
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - wall_s()))
        if not ready:
            raise NotMeasured(f"no answer within {_PATIENCE_S:.0f} s")
        part = process.stdout.read(1 << 16)
        if not part:
            raise NotMeasured(_last_words(process.wait(), errors))
        line += part
    return json.loads(line)


def _last_words(code: int, errors: IO[str]) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    return f"its process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
