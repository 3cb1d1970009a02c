"""Graph to graph: parts of a graph, dead and repeated nodes, memory to use again. No torch.

`names.py` has what every rewriting is made of: the values that a node takes, and other names for them.
"""
