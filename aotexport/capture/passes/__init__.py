"""Graph to graph: a `Draft` of a traced forward graph goes through the passes of `order.py`, one a file.

A pass is a function from draft to draft, decorated with the facts that it requires and guarantees (`contract.py`). A
new one gets a file, a place in `order.py`, and a test on a small graph as text
(`tests/unit/exporter/test_passes.py`). Passes know nothing of how the graph was traced.
"""
