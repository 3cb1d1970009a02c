"""The chain of a call: guards, flattening, the graph, and the epilogues. `plan.py` composes it."""
