"""What every worker imports, once: workers are forks of the process that has imported this, and share its memory."""

from __future__ import annotations

import gc
import importlib

importlib.import_module("aotexport_runtime.server.endpoints.worker")
gc.collect()
# Objects that no collection touches stay in shared pages.
gc.freeze()
