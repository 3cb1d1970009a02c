"""The chain of a call: guards, flattening, the graph, and the epilogues. `plan.py` composes it.

The user's arguments and the module's tensors come in, the results of the call go out; inputs are changed as eager
changes them. Which engine runs the graph is decided in `engines/`.
"""
