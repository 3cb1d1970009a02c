"""The site: `make site` builds it from the pages where they stand. A link that leads nowhere fails."""

from __future__ import annotations

from typing import Any

import aotexport

project = "aotexport"
version = release = aotexport.__version__
copyright = "The aotexport authors"
root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/*.md"),
    *(
        "docs/*.md",
        "docs/decisions/*.md",
        "examples/*.md",
        "examples/**/*.md",
        "runtimes/python/*.md",
        "schemas/*.md",
        "tests/*/README.md",
        "tests/golden/*/README.md",
    ),
]

# Sphinx looks through every folder that is left: an environment has tens of thousands of files.
exclude_patterns = [".*", "out", "aotexport", "runtimes/python/aotexport_runtime", "tests/golden/*/*/*"]

extensions = [
    *("myst_parser", "sphinx_copybutton"),
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"),
]
myst_heading_anchors = 4
napoleon_custom_sections = [("Options", "params_style")]
default_role = "code"
autodoc_member_order = "bysource"
suppress_warnings = [
    "misc.highlighting_failure",  # JSON with parts left out
    "toc.not_included",  # decisions and examples, which pages of theirs list
    "myst.domains",  # the commands' domain has no links of the kind that pages use
]
man_pages = [("docs/cli", "aotexport", "portable bundles of PyTorch models", [], 1)]
html_theme = "furo"
html_title = "aotexport"


def setup(app: Any) -> None:
    """With `-t quick`, leave out the reference, which takes half of the time."""
    if "quick" in app.tags:
        app.connect("source-read", _without_reference)


def _without_reference(_: Any, page: str, text: list[str]) -> None:
    if page in ("docs/api", "docs/cli"):
        text[0] = text[0].partition("\n")[0]
