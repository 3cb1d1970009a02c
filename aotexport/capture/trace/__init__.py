"""Python to a forward graph: the example call runs on fake tensors under a tracer.

It turns an `ExampleCall` into a `Trace`, of which passes make a `ForwardCapture`. It knows nothing of autograd's joint
graphs and of records.
"""
