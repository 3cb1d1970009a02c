"""What the golden calls are; `record_calls.py` writes them with what eager shows."""

from tests.golden.call_table import by_hand, functional, graphs, programs
from tests.golden.call_table.row import CALLS

__all__ = ["CALLS", "by_hand", "functional", "graphs", "programs"]
