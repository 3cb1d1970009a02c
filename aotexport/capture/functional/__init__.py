"""AOTAutograd's functional graph of a forward graph, joint or inference graph with its metadata, or why there is none.

It uses the model's own code only where the forward graph lacks a backward.
"""
