"""Submodules of a loaded bundle: they hold its state, have their original names, and report every change.

A call of a bundle runs a graph, and no submodule's code. Changes of a submodule, other than of the values of its
tensors, reach calls because its tables report them: the graphs are composed anew, with calls of the submodules that
changed (`engines/forward/live_graph.py`). A change that no call can follow is refused.

    tables.py     dicts of tensors, submodules and hooks that report changes
    submodule.py  modules in the places of original submodules
    build.py      the tree of submodules with its state, from a manifest
    places.py     current places of tensors and submodules
    changes.py    submodules that differ from those that were loaded
"""
