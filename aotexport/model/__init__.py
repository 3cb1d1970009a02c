"""The user's model and its example call, before any trace.

It turns a model file, a module and arguments into `ExampleCall`, `State` and `ProgramSpec`, and has the means to leave
the model as it was. It knows nothing of graphs.
"""
