"""The functional graph of a forward graph: the joint graph or the inference graph, with its metadata.

It turns a `ForwardCapture` into AOTAutograd's graph, or says why there is none. It uses the model's own code only where
the forward graph lacks a backward.
"""
