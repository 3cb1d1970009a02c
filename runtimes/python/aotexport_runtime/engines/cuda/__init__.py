"""Precompiled kernels on NVIDIA GPUs: chosen for the device, loaded and launched through its driver.

Nothing here compiles, and nothing touches the driver before a program runs on a CUDA device.
"""
