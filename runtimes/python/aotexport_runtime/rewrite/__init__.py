"""Graph to graph: parts of a graph, dead and repeated nodes, memory to use again. All are made of `names.py`."""
