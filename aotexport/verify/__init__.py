"""Verification: the recorded calls of a bundle run in a fresh process, its kernels in an interpreter.

In comes a written bundle, out go comparisons with eager. Nothing is known here of how its graphs were made.
"""
