"""Ways to run a program's graphs: records of graphs come in, functions of flat inputs and symbols go out.

`select.py` chooses the engine by rules over facts that `candidates.py` collects, `codegen.py` makes Python of a graph,
and each engine of another kind is a file or a package. Calls, modules and guards are not known here.
"""
