"""A bundle on disk: opened, checked against its digests, its weights mapped.

In comes a directory, out go records that are valid, and tensors. Nothing is known here of how graphs run.
"""
