"""Python to graphs, in rooms.

effects/     what a call does beside computing, seen while its code runs under tracing
trace/       the example call as a forward graph, before autograd
passes/      changes and checks of that graph
functional/  the joint graph or the inference graph, with its metadata
programs/    what several programs of one model share
"""
