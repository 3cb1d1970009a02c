"""A process that gives up its rights before it reads what a stranger wrote: no files to write, no network, no programs.

Imports neither torch nor numpy: a process enters before it has threads.
"""

from aotexport_runtime.sandbox.enter import enter

__all__ = ["enter"]
