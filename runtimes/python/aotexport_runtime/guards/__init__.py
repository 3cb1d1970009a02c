"""Guards: which calls does a program serve? Rows: a predicate, a message, the cost of the predicate.

    arguments.py    tensors, integers, sizes, symbols; facts of arguments that the model's code reads  every engine
    caller.py       modes of the process; the module's own tensors, hooks, ties                       all but ONNX
    signature.py    structure of the arguments and their constants                                    every engine
    engines/*/guards.py   what one engine does not serve

Two functions are generated from the rows: `rule.py` makes one that explains, `call/plan.py` one that serves the
usual calls. The quick form of a row asks the same more cheaply, or is marked `stricter`. A program with a row that has
none (tensor subclasses, arguments that an ONNX model writes to) has no fast path.
"""
