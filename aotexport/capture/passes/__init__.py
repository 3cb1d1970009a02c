"""Graph to graph: a `Draft` of a traced forward graph goes through the passes of `order.py`, one a file.

A pass is a function from draft to draft, decorated with the facts that it requires and guarantees (`contract.py`). A
new one gets a file, a place in `order.py`, and a test on a small graph as text
(`tests/unit/exporter/test_passes.py`). Passes know nothing of how the graph was traced.

What a pass keeps, beside the values:

- conversions of dtypes, also those with nothing to do: a bundle may be loaded in another dtype, or called under
  autocast;
- which result is the very tensor of an input, of state or of another result, and what is written in place;
- the nodes that submodules take and return: the trace refers to them, and a submodule whose node is gone cannot be
  replaced in a loaded module.
"""
