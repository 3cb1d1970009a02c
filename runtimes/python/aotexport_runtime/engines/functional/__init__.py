"""The functional graph as an engine: a joint graph as an `autograd.Function`, or an inference graph, and epilogues.

Mutations are applied, aliases are made, and the versions and the grad mode that the call leaves are set.
"""
