"""The only package that imports torch's private names; written for torch 2.13.

`tests/meta/test_torch_internals.py` fails with a clear message when torch moves one.
"""
