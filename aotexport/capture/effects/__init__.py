"""Side effects of a call, seen by patches while its code runs under tracing.

Attributes and containers that change, grad mode, hooks, checkpoints, custom autograd functions, calls of submodules and
launches of kernels: each is recorded in the trace as a node, noted in `Effects`, or refused. This package knows nothing
of strategies and passes.
"""
