"""`python -m aotexport`: the same as the command `aotexport`."""

from aotexport.cli import main

main()
