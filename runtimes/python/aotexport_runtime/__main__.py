"""`python -m aotexport_runtime COMMAND bundle/`, for containers without the exporter; `--help` lists the commands."""

from __future__ import annotations

import sys

from aotexport_runtime.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
