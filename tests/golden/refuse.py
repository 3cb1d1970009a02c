"""Bundles that every reader refuses: `python -m tests.golden.refuse DIRECTORY` writes them, each in a directory.

`refused/cases.json` has them as edits of goldens, with the code, the file, the JSON path and the text of the refusal;
`taken/cases.json` has bundles that every reader takes.
"""

import hashlib
import json
import os
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
            `set` (a value, at the keys and indices `at`), `append` (to the array at `at`; `times`: so often), `remove`
            (what is at `at`), `replace` (a pair, text by text, once), `text` (the whole file; also `times`),
            `safetensors` (the file by its header, and data of as many bytes as that says, all 0), `resize` (to so many
            bytes, new ones are a hole), `link` (the file goes to this path, and leads there), `delete`.
            Sizes and digests in the manifest are made right afterwards, unless `sealed` is false.
        root: directory, which must not be there.
    """
    shutil.copytree(bundle_of(case["golden"]), root)
    for edit in case["edits"]:
        _edit(root / edit["file"], edit)
    return seal(root) if case.get("sealed", True) else root


def bundle_of(golden: str) -> Path:
    """Return the directory of the bundle of a golden."""
    (found,) = HERE.glob(f"v*/{golden}/bundle")
    return found


def _edit(path: Path, edit: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if "delete" in edit:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif "resize" in edit:
        os.truncate(path, edit["resize"])
    elif "link" in edit:
        shutil.move(path, path.parent / edit["link"])
        path.symlink_to(edit["link"])
    elif "safetensors" in edit:
        header = json.dumps(edit["safetensors"]).encode()
        header += b" " * (-len(header) % 8)
        data = bytes(max(entry["data_offsets"][1] for entry in edit["safetensors"].values()))
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    elif "text" in edit:
        path.write_text(edit["text"] * edit.get("times", 1), encoding="utf-8")
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
        document.setdefault(last, []).extend([edit["append"]] * edit.get("times", 1))
    else:
        document[last] = edit["set"]


def seal(root: Path) -> Path:
    """Write size and digest of each file that is another to the manifest of a directory, if it is one; return it."""
    manifest = root / "bundle.json"
    try:
        document = json.loads(manifest.read_text(encoding="utf-8"))
        files = {str(entry["path"]): entry for entry in document["files"]}
    except (OSError, ValueError, KeyError):
        return root
    data = {path: (root / path).read_bytes() for path in files if (root / path).is_file()}
    digests = {path: hashlib.sha256(each).hexdigest() for path, each in data.items()}
    changed = [path for path, digest in digests.items() if digest != files[path]["sha256"]]
    for path in changed:
        files[path] |= {"nbytes": len(data[path]), "sha256": digests[path]}
    if changed:
        manifest.write_text(json.dumps(document), encoding="utf-8")
    return root


if __name__ == "__main__":
    for name, case in CASES.items():
        edited_bundle(case, Path(sys.argv[1]) / name)
