"""A bundle on disk: opened, checked against its digests, its weights mapped.

It reads a directory, and returns valid records and tensors. It does not know how graphs run.
"""
