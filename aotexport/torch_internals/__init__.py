"""The only package that imports torch's private names; written for torch 2.13 to 2.15.

`releases.py` has what differs between these. `tests/meta/test_torch_internals.py` fails with a clear message when torch
moves a name.
"""

import importlib

from aotexport.torch_internals.releases import is_tested, unfit_release

try:
    importlib.import_module("aotexport.torch_internals.names")
except ImportError as error:
    if is_tested():
        raise
    raise unfit_release(f"since this one has not all names of torch that are needed ({error})") from error
