"""The command line, a file per command; nothing here imports torch before a command needs it."""

from aotexport.cli.app import app, main

__all__ = ["app", "main"]
