"""Python to graphs: the example call, the module's state, the forward graph, the functional graph.

call.py        the callable and its example arguments, flat
state.py       parameters, buffers and tensor attributes of the module
strategies.py  ways to make Python code traceable, tried in order
forward.py     the graph before autograd
functional.py  the joint or inference graph, with its metadata
shapes.py      symbols, ranges and guards of dynamic sizes
effects.py     what tracing would lose; stand_ins.py and attributes.py detect it, watching.py has them at work
"""
