"""Graphs to Python: records of graphs come in, functions of flat inputs and symbols go out.

`codegen.py` makes Python of a graph, `ops.py` finds its operators, `preconditions/` keep them within bounds. Calls,
guards and modules are not known here.
"""
