"""Submodules of a loaded bundle: they hold its state under the original names, and their tables report every change.

A change composes the graphs anew, with calls of what changed (`engines/forward/live_graph.py`), or is refused.
"""
