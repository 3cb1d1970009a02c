"""Run kernels of a bundle from their sources, by Triton's interpreter on the CPU, and compare with recorded calls."""
