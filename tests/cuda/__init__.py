"""Lowering to kernels for GPUs, on a machine without one."""
