"""The only package that imports torch's private names; written for torch 2.13 to 2.15.

`releases.py` has what differs between these. `tests/meta/test_torch_internals.py` fails with a clear message when torch
moves a name.
"""
