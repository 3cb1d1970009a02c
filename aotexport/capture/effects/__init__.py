"""What a call does beside computing, seen by patches while its code runs under tracing.

Attributes and containers that change, grad mode, hooks, checkpoints, custom autograd functions, calls of submodules and
launches of kernels: each is recorded in the trace as a node, noted in `Effects`, or refused. Nothing is known here of
strategies and of passes.
"""
