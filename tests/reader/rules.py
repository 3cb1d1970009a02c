"""The rules of the text, each with an edit of this reader that takes it away, and the data that notices."""

import json
from pathlib import Path
from typing import NamedTuple


class Rule(NamedTuple):
    """A rule that this reader follows, or a part of one.

    Attributes:
        number: where `schemas/README.md` or `schemas/beyond.md` has it.
        says: in a few words.
        file: module of this reader.
        old: text of the module, which it has once.
        new: what stands there without the rule.
        by: `golden:`, `taken:`, `refused:` or `call:`, and the name of what notices: recorded calls of a golden, a
            bundle that every reader takes, one that every reader refuses, a golden call.
    """

    number: str
    says: str
    file: str
    old: str
    new: str
    by: str


RULES = [Rule(*row) for row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))]
