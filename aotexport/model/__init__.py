"""The user's model and its example call, as they are before anything is traced.

In comes what the user gives: a model file, a module, arguments. Out go `ExampleCall`, `State` and `ProgramSpec`, and
ways to leave the model as it was. Nothing is known here of graphs.
"""
