"""The beginning of a worker; the parent, which imports no server, hands it to a new process."""

from __future__ import annotations

from typing import Any


def start(*arguments: Any) -> None:
    """Run a worker; see `work`."""
    from aotexport_runtime.server.endpoints.worker import work

    work(*arguments)
