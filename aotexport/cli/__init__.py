"""The command line: `aotexport model.py -o bundle/`, and one file per further command.

Nothing here imports torch before a command needs it.
"""

from aotexport.cli.app import app, main

__all__ = ["app", "main"]
