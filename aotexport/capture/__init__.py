"""Python to graphs, in rooms.

effects/     side effects of a call, seen while its code runs under tracing
trace/       the example call as a forward graph, before autograd
passes/      changes and checks of that graph
functional/  the joint graph or the inference graph, with its metadata
programs/    forward graphs shared between the programs of one model
"""

import importlib

from aotexport.torch_internals.releases import is_tested, unfit_release

try:
    importlib.import_module("aotexport.torch_internals.names")
except ImportError as error:
    if is_tested():
        raise
    raise unfit_release(f"since this one has not all names of torch that are needed ({error})") from error
