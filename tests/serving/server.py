"""A server in processes of its own, and what its log says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120


class Server:
    """`python -m aotexport_runtime serve` at free ports, with the lines of its log."""

    def __init__(self, repository, *options, before=""):
        """Start it; `before` is a directory where modules are looked for first."""
        command = ["-m", "aotexport_runtime", "serve", repository, "--http-port", "0", "--grpc-port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command), "--poll-s", "0.1", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(map(str, (before or ROOT, ROOT, ROOT / "runtimes/python")))},
        )
        self.log, self.other = [], []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listens = self.wait_for_log("server listens")
        self.http, self.grpc = (f"127.0.0.1:{listens[key]}" for key in ("http_port", "grpc_port"))

    def _read(self):
        for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.other.append(line)

    def lines(self, message, **fields):
        return [line for line in [*self.log] if line["message"] == message and fields.items() <= line.items()]

    def wait_for_log(self, message, *, times=1, **fields):
        """Return the line number `times` with the message and the fields."""
        return wait_for(lambda: self.lines(message, **fields)[times - 1 :], self)[0]

    def ask(self, path, body=None, headers=None, method=None):
        """Return status, JSON or bytes, and headers of an HTTP response."""
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        request = urllib.request.Request(f"http://{self.http}{path}", data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                status, content, found = response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            status, content, found = error.code, error.read(), error.headers
        is_json = found.get("content-type") == "application/json" and "inference-header-content-length" not in found
        return status, json.loads(content) if is_json and content else content, found

    def wait_until_ready(self):
        wait_for(lambda: self.ask("/v2/health/ready")[0] == 200, self)
        return self

    def workers(self):
        """Return the ids of the workers that live."""
        ended = {line["worker"] for line in self.lines("worker has ended")}
        return [line["worker"] for line in self.lines("worker starts") if line["worker"] not in ended]

    def end(self):
        """Tell the server to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        self.process.stderr.close()
        return code


def wait_for(found, server=None):
    """Return what `found` returns as soon as that is true."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server ended, or in the middle of an answer
            if value := found():
                return value
        if server is not None and server.process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"waited in vain; the log: {server and (server.log[-20:], server.other[-20:])}")


@contextlib.contextmanager
def serving(repository, *options, **more):
    """Run a server until the end of the block; it has to end by itself then."""
    server = Server(repository, *options, **more)
    try:
        yield server
        assert server.end() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
