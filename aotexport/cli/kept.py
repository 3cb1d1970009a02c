"""An export of the command line: written from the cache, or made now and kept there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from aotexport.cache.entries import Entries, user_entries
from aotexport.cli.progress import Progress
from aotexport.process.opened_files import OpenedFiles
from aotexport.process.own import watched
from aotexport.verify.fresh import FreshProcess

if TYPE_CHECKING:
    from aotexport.model.source import ModelSource
    from aotexport.pipeline.options import ExportOptions

Cache = tuple[Entries, OpenedFiles]
"""Where exports are kept, and the files that this process has opened."""


def user_cache() -> Cache | None:
    """Return the user's cache, for a process that does nothing else; begins the process again if it must.

    Raises:
        UsageError: a variable about the cache is wrong.
    """
    opened = watched()
    try:
        entries = user_entries()
    except ValueError:
        raise click.UsageError("AOTEXPORT_CACHE_SIZE must be a number of bytes") from None
    return None if entries is None else (entries, opened)


def exported(
    source: ModelSource,
    options: ExportOptions,
    fresh: FreshProcess | None,
    progress: Progress,
    cache: Cache | None,
) -> dict[str, Any]:
    """Write a bundle, and return what there is to say of it; see `summarize`.

    Args:
        source: the model and its example calls.
        options: of the export.
        fresh: the process that verifies; None: nothing is verified.
        progress: of the command.
        cache: where to look for the bundle, and to keep it; None: nowhere.
    """
    from aotexport.cache.exports import KeptExports

    kept, found = None if cache is None else KeptExports(*cache), None
    if kept is not None:
        progress("look in the cache")
        found = kept.find(source, options)
    if kept is not None and found is not None:
        progress("write the bundle from the cache")
        if kept.write(found, options.output, force=options.force):
            return {**found.kept["summary"], "from_cache": True}
    progress("import torch's compiler")
    from aotexport.cli.summary import summarize
    from aotexport.pipeline.export import export_as

    report = export_as(source.target, source.args, source.kwargs, options, fresh)
    summary = summarize(report, verified=bool(options.verify))
    if kept is not None:
        progress("keep the bundle in the cache")
        kept.keep(options.output, summary)
        for remark in kept.remarks:
            progress.remark(remark)
    return summary
