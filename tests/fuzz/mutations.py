"""Mutations of a bundle's files: of its JSON, of headers of safetensors, of bytes; the same for the same seed."""

import json
import random
import struct
from collections.abc import Mapping
from typing import Any

_INTEGERS = (-1, 0, 1, 2, 3, 7, 64, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 64, 10**30)
_NAMES = ("", "x", "a b", "__class__", "../x", "/etc/passwd", "ª", "\x1b[31m", "\u0000", "constructor", "é" * 40)
_KINDS = ("tensor", "size", "scalar", "sequence", "nothing", "leaf", "constant", "subgraph", "float", "string", "slice")
_OPERATORS = (
    *(
        "aten::relu.default",
        "aten::unbind.int",
        "aten::item.default",
        "aten::empty.memory_format",
        "aten::view.default",
    ),
    *("python::pow", "python::mul", "python::add", "python::getitem", "python::lshift", "python::round_digits"),
    *("higher_order::while_loop", "higher_order::invoke_subgraph", "higher_order::cond", "torch::set_grad_enabled"),
    *(
        "aten::from_file.default",
        "os::system.default",
        "subclass::wrap",
        "aten::as_strided.default",
        "aten::sum.default",
    ),
)


class Mutator:
    """Draws the changes of one case."""

    def __init__(self, seed: str) -> None:
        """Begin with a seed."""
        self.random = random.Random(seed)

    def changed(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files of a bundle that a case changes, with their new bytes; sometimes two files are exchanged."""
        draw = self.random
        paths = sorted(files)
        if draw.random() < 0.03:
            one, other = draw.choice(paths), draw.choice(paths)
            return {one: files[other], other: files[one]}
        path = draw.choice([path for path in paths if path.endswith(".json")] if draw.random() < 0.85 else paths)
        data = files[path]
        kind = draw.random()
        if path.endswith(".json") and kind < 0.9:
            return {path: self.json_changed(data)}
        if path.endswith(".safetensors") and kind < 0.8:
            return {path: self.header_changed(data)}
        return {path: self.bytes_changed(data)}

    def json_changed(self, data: bytes) -> bytes:
        """Return a JSON document with one change or several."""
        document = json.loads(data)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 8))):
            document = self._changed(document)
        return json.dumps(document).encode()

    def header_changed(self, data: bytes) -> bytes:
        """Return a file of safetensors with changes in its header."""
        (length,) = struct.unpack_from("<Q", data)
        try:
            header = self.json_changed(data[8 : 8 + length])
        except ValueError:
            return self.bytes_changed(data)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]

    def bytes_changed(self, data: bytes) -> bytes:
        """Return bytes with one change or several."""
        draw, changed = self.random, bytearray(data)
        for _ in range(draw.choice((1, 2, 8))):
            place = draw.randrange(len(changed) + 1)
            kind = draw.randrange(4)
            if kind == 0 and place < len(changed):
                changed[place] ^= 1 << draw.randrange(8)
            elif kind == 1:
                changed[place:place] = draw.randbytes(draw.choice((1, 4, 64)))
            elif kind == 2:
                del changed[place : place + draw.choice((1, 4, 64, 1 << 20))]
            else:
                start = draw.randrange(len(changed) + 1)
                changed[place:place] = changed[start : start + draw.choice((4, 64, 512))]
        return bytes(changed)

    def _changed(self, document: Any) -> Any:
        """Return a document with one change at a place that is drawn."""
        places = list(_places(document))
        if not places:
            return self._value(document)
        owner, key = self.random.choice(places)
        kind = self.random.random()
        if kind < 0.15:
            del owner[key]
        elif kind < 0.3:
            # Something from elsewhere in the document, of a form that readers know.
            other_owner, other_key = self.random.choice(places)
            owner[key] = json.loads(json.dumps(other_owner[other_key]))
        elif kind < 0.4 and isinstance(owner, list):
            owner.insert(key, json.loads(json.dumps(owner[key])))
        elif kind < 0.45 and isinstance(owner, dict):
            owner[self.random.choice(_NAMES)] = owner.pop(key)
        else:
            owner[key] = self._value(owner[key])
        return document

    def _value(self, old: Any) -> Any:
        draw = self.random
        if draw.random() < 0.7:
            if isinstance(old, bool):
                return not old
            if isinstance(old, int):
                return draw.choice((*_INTEGERS, old + 1, old - 1, -old))
            if isinstance(old, str) and "::" in old:
                return draw.choice(_OPERATORS)
            if isinstance(old, str):
                return draw.choice((*_NAMES, *_KINDS, old + "x", old[:-1]))
            if isinstance(old, list):
                return draw.choice((old * 2, old[::-1], old[:1] * 100, [], [old]))
        return draw.choice(
            (None, True, 1, -1.5, 1e308, "x", [], {}, [[1]], {"kind": "size"}, {"kind": draw.choice(_KINDS)})
        )


def _places(document: Any) -> list[tuple[Any, Any]]:
    found = list[tuple[Any, Any]]()
    rest = [document]
    while rest:
        container = rest.pop()
        keys = (
            range(len(container))
            if isinstance(container, list)
            else list(container)
            if isinstance(container, dict)
            else ()
        )
        for key in keys:
            found.append((container, key))
            rest.append(container[key])
    return found
