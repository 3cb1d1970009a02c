"""Fused kernels for CUDA devices, built without one.

functional graph -> retarget -> partition -> lower -> kernels -> compile, per architecture -> record
"""
