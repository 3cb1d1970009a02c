"""Guards: which calls does a program serve? One table of rows: a predicate, a message, the cost of the predicate.

    arguments.py    tensors, integers, sizes, symbols; facts of arguments that the model's code read  every engine
    caller.py       modes of the process; the module's own tensors, hooks, ties                       all but ONNX
    signature.py    structure of the arguments and their constants                                    every engine
    engines/*/guards.py   what one engine does not serve

Two functions are generated from the rows: `table.py` makes one that explains, `call/fast_path.py` one that serves the
usual calls. Both use the same predicates. The quick form of a row asks the same more cheaply, or is marked `stricter`:

- `tensor`: quick paths take tensors of torch's own class, parameters, or arrays; other calls may hold subclasses;
- `strides`: quick paths compare all steps; steps along axes of at most one element do not matter;
- `no gradients` (ONNX): quick paths do not ask whether gradients are enabled.

Rows of tensor subclasses, and of arguments that an ONNX model writes to, have no quick form: such programs have no
quick path. A row without a message is a condition of quick paths alone, about how values are handed over.
"""
