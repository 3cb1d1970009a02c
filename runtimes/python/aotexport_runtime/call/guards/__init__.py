"""Guards: which calls does a program serve? One table of rows: a predicate, a message, what the predicate costs.

    arguments.py    tensors, integers, sizes, symbols; what the model's code read off its arguments   every engine
    caller.py       modes of the process; the module's own tensors, hooks, ties                       all but ONNX
    functional.py   what one functional graph is specialised for; others run the forward graph        portable, lowered
    ../onnx/guards.py   gradients and memory, of which a model of ONNX knows nothing                  ONNX

`table.py` makes of the rows a function that only answers (`admits`, inlined by `quick_path.py` in what serves the usual
calls) and one that explains (`violations`). Both are made of one predicate. Where a row has a quick form beside it, it
asks the same more cheaply, or is marked `stricter`:

- `tensor`: quick paths take tensors of torch's own class, parameters, or arrays; subclasses are looked at again;
- `strides`: quick paths compare all steps; steps along axes of at most one element do not matter;
- `no gradients` (ONNX): quick paths do not look whether gradients are enabled.

Rows of tensor subclasses, and of what a model of ONNX writes to, have no quick form: such programs have no quick path.
What a quick path asks beside rules (`message` is None) says nothing of the call: it is how values are handed over.
"""
