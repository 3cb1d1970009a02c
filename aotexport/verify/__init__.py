"""Verification: the recorded calls of a bundle run in a fresh process, its kernels in an interpreter."""
