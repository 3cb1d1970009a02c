"""`pytest -p tests.workers --workers 2`: shares the test files among forks of one process that has imported them all.

Importing the tests and what they use takes half a minute, which processes that begin anew spend each.
"""

import gc
import os
import signal
import struct
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, cast

import pytest

FIRST = (
    *("conformance/test_cases.py", "conformance/test_generation.py", "conformance/test_onnx.py"),
    *("conformance/test_changed_modules.py", "conformance/test_derive.py", "conformance/test_steps.py"),
)
"""The files that take longest: both workers end together if these do not come last."""
TOGETHER = (
    ("e2e/", "unit/test_schema_determinism", "unit/exporter/test_decomposed_traces", "unit/exporter/test_patches"),
    ("interpreter/",),
)
"""Files of one worker: they fork the same process of `tests/forked.py`, whose start takes longer than most tests."""
_PLACE = struct.Struct("H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="how many processes run the test files; 0: this one")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers and not config.option.collectonly:
        config.pluginmanager.register(_Workers(config))


class _Workers:
    """Runs the tests in forks, and reports what they report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None
        files: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            name = os.path.relpath(item.path, Path(__file__).parent)
            files.setdefault(next((each[0] for each in TOGETHER if name.startswith(each)), name), []).append(item)
        first = {name: place for place, name in enumerate((*FIRST, *(each[0] for each in TOGETHER)))}
        ordered = [files[name] for name in sorted(files, key=lambda name: first.get(name, len(first)))]
        queue, end = os.pipe()
        os.write(end, b"".join(_PLACE.pack(place) for place in range(len(ordered))))
        os.close(end)
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = False
        gc.collect()
        gc.freeze()
        workers = dict(self._begun(session, number, ordered, queue) for number in range(self._config.option.workers))
        running = dict.fromkeys(workers, "its start")
        try:
            while running and not session.shouldfail:
                for worker in wait(list(running)):
                    assert isinstance(worker, Connection)
                    try:
                        self._receive(worker, running)
                    except EOFError:
                        raise pytest.UsageError(f"the process of {running[worker]} died") from None
        finally:
            for process in workers.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _receive(self, worker: Connection, running: dict[Connection, str]) -> None:
        what, value = worker.recv()
        if what == "ended":
            del running[worker]
        elif what == "runs":
            running[worker] = value
        else:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=value)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _begun(
        self, session: pytest.Session, number: int, files: list[list[pytest.Item]], queue: int
    ) -> tuple[Connection, int]:
        here, there = Pipe(duplex=False)
        process = os.fork()
        if process:
            there.close()
            return here, process
        try:
            self._run(session, number, _taken(files, queue), there)
            there.send(("ended", ""))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _run(self, session: pytest.Session, number: int, items: Iterator[pytest.Item], to: Connection) -> None:
        """Run tests in this fork, which reports to its parent alone."""
        plugins, config = self._config.pluginmanager, cast(Any, self._config)
        plugins.unregister(name="terminalreporter")
        plugins.register(_Reporter(self._config, to))
        capture: Any = plugins.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        folders = config._tmp_path_factory  # of this fork alone: forks would race for numbers
        folders._basetemp = folders.getbasetemp() / f"worker{number}"
        folders._basetemp.mkdir(0o700)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following if not (session.shouldfail or session.shouldstop) else None


class _Reporter:
    """Sends reports of tests to the parent of this process."""

    def __init__(self, config: pytest.Config, to: Connection) -> None:
        self._config, self._to = config, to

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._to.send(("runs", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._to.send(("report", data))


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """Yield the tests of files that no other fork has taken."""
    while place := os.read(queue, _PLACE.size):
        yield from files[_PLACE.unpack(place)[0]]
