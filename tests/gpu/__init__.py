"""What only a GPU can show: `python -m pytest tests/gpu` where torch sees one; elsewhere everything is skipped."""
