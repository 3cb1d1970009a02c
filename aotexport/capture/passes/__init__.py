"""Graph to graph: a `Draft` of a traced forward graph goes through the passes of `order.py`.

A pass is a function from draft to draft; a new one gets a place in `order.py` and a case in `tests/cases`. Passes know
nothing of how the graph was traced.

What a pass keeps, beside the values:

- casts (`aten.to.*`), also those with nothing to do: a bundle may be loaded in another dtype, or called under
  autocast, and a submodule in a loaded module may be replaced by one that returns another dtype. Other dtypes never
  reach integer and boolean arguments, whose dtypes are guarded, and results of a cast that names its dtype. Functional
  graphs have no casts without anything to do: AOTAutograd leaves them out;
- which result is the very tensor of an input, of state or of another result, and what is written in place;
- the nodes that submodules take and return (`ForwardCapture.calls`): a submodule whose node is gone cannot be replaced
  in a loaded module. `Draft` has no list of them: a pass that removes values gets one there.
"""
