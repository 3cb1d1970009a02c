"""Compare tensors; encode sizes and tensor subclasses of torch as records of the schema.

This package knows nothing of graphs.
"""
