"""Verification: the recorded calls of a bundle run in a fresh process, its kernels in an interpreter.

It turns a written bundle into comparisons with eager, and knows nothing of how its graphs were made.
"""
