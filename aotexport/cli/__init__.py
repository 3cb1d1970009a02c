"""The command line: `aotexport model.py -o bundle/`, and the commands `inspect`, `verify` and `diff`.

Nothing here imports torch before a command needs it.
"""

from aotexport.cli.app import app, main

__all__ = ["app", "main"]
