"""Python to graphs, in rooms.

effects/     side effects of a call, seen while its code runs under tracing
trace/       the example call as a forward graph, before autograd
passes/      changes and checks of that graph
functional/  the joint graph or the inference graph, with its metadata
programs/    forward graphs shared between the programs of one model
"""
