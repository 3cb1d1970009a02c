"""Kernels of bundles on the CPU, through Triton's interpreter, against recorded eager results."""
