"""The functional graph of a forward graph: the joint graph or the inference graph, with its metadata.

In comes a `ForwardCapture`, out goes AOTAutograd's graph or the reason why there is none. Nothing is known here of the
model's code, but that graphs are traced from it where the forward graph lacks a backward.
"""
