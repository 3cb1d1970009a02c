"""Many samples from torch's own collections and from transformers, exported, loaded in a fresh process, beside eager.

`python -m tests.sweeps` runs them and rewrites the tables in `results/`; `make test-full` compares with the tables.
"""

import importlib
import sys
import types
import unittest

# torch's collections import `expecttest`, for assertions that the sweeps do not use.
try:
    importlib.import_module("expecttest")
except ImportError:
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)  # type: ignore[assignment]
