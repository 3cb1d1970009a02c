"""`aotexport cache`: the bundles that are kept for the next export of the same model."""

from __future__ import annotations

import time

import click

from aotexport.cli.output import stdout
from aotexport_runtime.errors import printable


@click.command(short_help="Show or clear the bundles kept of earlier exports.")
@click.option("--clear", is_flag=True, help="Remove all of them.")
def cache(clear: bool) -> None:
    """Show the directory of the cache, and the bundles in it.

    An export of the same model, code, options and versions writes the bundle from there. `AOTEXPORT_CACHE` names
    another directory, `AOTEXPORT_CACHE_SIZE` the bytes that all bundles may have together.
    """
    from aotexport.cache.entries import user_entries

    entries = user_entries()
    if entries is None:
        raise click.UsageError("there is no home directory; name a directory by AOTEXPORT_CACHE")
    console, found = stdout(), [each for each in entries.listed() if not each[0].name.startswith(".")]
    nbytes = sum(nbytes for _, _, nbytes in found)
    doing = "removed from" if clear else "in"
    console.print(f"{len(found)} bundles, {nbytes:,} bytes, {doing} {printable(str(entries.folder))}", soft_wrap=True)
    if clear:
        entries.clear()
        return
    for path, used_s, nbytes in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(used_s))
        console.print(f"  {path.name[:12]}  {nbytes:15,} bytes  last used {used}")
