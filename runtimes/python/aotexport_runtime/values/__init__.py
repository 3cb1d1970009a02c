"""Values of calls: trees, sizes, dtypes, tensor subclasses, arrays, and the comparison of what two calls give.

In come records of the schema and Python values, out go the others of the two. Nothing is known here of bundles on disk,
of graphs, or of modules.
"""
