"""Submodules of a loaded bundle: they hold its state under the original names, and their tables report every change.

A call runs a graph, and no submodule's code. Changes, but for those of values, compose the graphs anew, with calls of
the submodules that changed (`engines/forward/live_graph.py`); what no call can follow is refused.
"""
