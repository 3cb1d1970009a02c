"""Fused kernels for CUDA devices, built without one: retarget, partition, lower, compile per architecture, record."""
