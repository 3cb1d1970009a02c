"""Run kernels of a bundle from their sources, by Triton's interpreter on the CPU, and compare with recorded calls.

run.py        the comparison, in a process of its own
__main__.py   that process
engine.py     lowered programs whose launches are interpreted
libdevice.py  NVIDIA's device functions
"""
