"""Submodules of a loaded bundle: they hold its state, have their original names, and tell of every change.

A call of a bundle runs a graph, and no submodule's code. Whatever changes a submodule otherwise than in the values of
its tensors so reaches calls only because its tables tell of it: the graphs are composed anew then, with calls of the
submodules that changed (`call/live_graph.py`). A change that no call can follow is refused.

    tables.py     dicts of tensors, submodules and hooks that tell of changes
    submodule.py  what stands in the place of an original submodule
    build.py      the tree of submodules with its state, from a manifest
    places.py     where a tensor or submodule is kept now
    changes.py    which submodules are no longer what was loaded
    running.py    what submodules do in the call that is running
"""
