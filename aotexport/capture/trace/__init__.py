"""Python to a forward graph: the example call runs on fake tensors under a tracer.

In comes an `ExampleCall`, out goes a `Trace`, of which passes make a `ForwardCapture`. Nothing is known here of
autograd's joint graphs and of records.
"""
