"""Values of calls: trees, sizes, dtypes, tensor subclasses, arrays, and the comparison of two calls.

It converts records of the schema to Python values and back. It knows no bundles on disk, graphs, or modules.
"""
