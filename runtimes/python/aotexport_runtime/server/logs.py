"""Logs: one JSON object per line on the standard error."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from datetime import UTC, datetime
from typing import Any

import msgspec


class JsonLines(logging.Formatter):
    """Formats a record as one line: time, level, logger, process, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, whose `fields` are a dict if it has any."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": os.getpid(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_as_json() -> None:
    """Send every log of this process to the standard error, as lines of JSON; of libraries, from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:], root.level = [handler], logging.WARNING
    logging.getLogger("aotexport_runtime.server").setLevel(logging.INFO)
    logging.captureWarnings(True)
    # KServe 0.21 makes its application so.
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
    for name in ("kserve", "kserve.trace", "uvicorn", "uvicorn.access", "uvicorn.error"):
        library = logging.getLogger(name)
        library.handlers, library.propagate, library.level = [], True, logging.WARNING
