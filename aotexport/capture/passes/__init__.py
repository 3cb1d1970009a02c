"""Graph to graph: changes and checks of a traced forward graph, one a file.

Nothing is known here of how the graph was traced.
"""
