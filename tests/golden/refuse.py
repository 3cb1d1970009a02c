"""Bundles that every reader refuses: `python -m tests.golden.refuse DIRECTORY` writes them, each in a directory.

`refused/cases.json` has them as edits of goldens, with the code, the file and the JSON path of the refusal;
`taken/cases.json` has bundles that every reader takes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = json.loads((HERE / "refused/cases.json").read_text(encoding="utf-8"))
TAKEN: dict[str, dict[str, Any]] = json.loads((HERE / "taken/cases.json").read_text(encoding="utf-8"))


def edited_bundle(case: dict[str, Any], root: Path) -> Path:
    """Write the bundle of `case` to `root`; return it.

    Args:
        case: `golden`, its name, and `edits`; each of these has a `file` and one of
            `set` (a value, at the keys and indices `at`), `append` (to the array at `at`), `remove` (what is at `at`),
            `replace` (a pair, text by text, once), `text` (the whole file), `truncate` (to so many bytes), `delete`.
            Sizes and digests in the manifest are made right afterwards, unless `sealed` is false.
        root: directory, which must not be there.
    """
    shutil.copytree(bundle_of(case["golden"]), root)
    for edit in case["edits"]:
        _edit(root / edit["file"], edit)
    if case.get("sealed", True):
        _seal(root / "bundle.json", root)
    return root


def bundle_of(golden: str) -> Path:
    """Return the directory of the bundle of a golden."""
    (found,) = HERE.glob(f"v*/{golden}/bundle")
    return found


def _edit(path: Path, edit: dict[str, Any]) -> None:
    if "delete" in edit:
        path.unlink()
    elif "truncate" in edit:
        path.write_bytes(path.read_bytes()[: edit["truncate"]])
    elif "text" in edit:
        path.write_text(edit["text"], encoding="utf-8")
    elif "replace" in edit:
        old, new = edit["replace"]
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in {path.name}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    else:
        document = json.loads(path.read_text(encoding="utf-8"))
        _put(document, edit)
        path.write_text(json.dumps(document), encoding="utf-8")


def _put(document: Any, edit: dict[str, Any]) -> None:
    *steps, last = edit["at"]
    for step in steps:
        document = document[step]
    if "remove" in edit:
        del document[last]
    elif "append" in edit:
        document.setdefault(last, []).append(edit["append"])
    else:
        document[last] = edit["set"]


def _seal(manifest: Path, root: Path) -> None:
    """Write sizes and digests to the manifest, if it is one: text by text, since it may be edited itself."""
    text = manifest.read_text(encoding="utf-8")
    try:
        entries = json.loads(text)["files"]
    except (ValueError, KeyError):
        return
    for entry in entries:
        file = root / str(entry["path"])
        if not file.is_file():
            continue
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry["sha256"]:
            entry.update(nbytes=len(data), sha256=digest)
            document = json.loads(text)
            document["files"] = entries
            manifest.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    for name, case in CASES.items():
        edited_bundle(case, Path(sys.argv[1]) / name)
