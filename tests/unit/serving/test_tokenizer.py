"""Texts to tokens and back, and chats, as transformers does it; templates get at nothing."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import transformers

from aotexport_runtime import ArgumentInvalid
from aotexport_runtime.schema.manifest import FileEntry
from aotexport_runtime.serving.tokenizer import Text, Tokenizer
from tests.unit.serving.language_models import TEMPLATE, saved

CHAT = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "I"}, {"role": "user", "content": "serve"}]


@dataclasses.dataclass
class Files:
    """What a tokenizer reads of a bundle."""

    files: dict[str, bytes]

    @property
    def manifest(self):
        entries = [FileEntry(path=path, nbytes=len(data), sha256="0" * 64) for path, data in self.files.items()]
        return type("Manifest", (), {"files": entries})

    def read(self, path):
        return self.files[path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    saved("llama", path)
    return path


def tokenizer_of(directory, **changed):
    files = {
        f"tokenizer/{path.name}": path.read_bytes() for path in directory.iterdir() if path.suffix != ".safetensors"
    }
    return Tokenizer.of(Files({**files, **{f"tokenizer/{name}": data for name, data in changed.items()}}))


def templated(directory, template):
    return tokenizer_of(directory, **{"chat_template.jinja": template.encode()})


def test_tokens_and_texts_are_those_of_transformers(directory):
    ours, theirs = tokenizer_of(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert ours.tokens("a größer 😀 the") == theirs("a größer 😀 the")["input_ids"]
    drawn = random.Random(0)
    for _ in range(300):
        ids = [drawn.randrange(len(theirs)) for _ in range(drawn.randrange(1, 20))]
        text = Text(ours, [])
        assert "".join([*map(text.add, ids), text.end()]) == theirs.decode(ids, skip_special_tokens=True)


def test_text_ends_before_the_first_stop_sequence(directory):
    ours, drawn = tokenizer_of(directory), random.Random(1)
    for _ in range(300):
        ids = [drawn.randrange(4, 299) for _ in range(12)]
        whole = ours.text(ids)
        begin = drawn.randrange(len(whole))
        stop = whole[begin : begin + drawn.randrange(1, 4)]
        text, found = Text(ours, ["never seen", stop]), ""
        for token in ids:
            found += text.add(token)
            if text.stopped:
                break
        assert found + text.end() == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% generation %}{{ messages[-1]['content'] }}{% endgeneration %}{{ dict(a=1) }}",
    ],
)
def test_chats_are_rendered_as_by_transformers(directory, template):
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    theirs.chat_template = template
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert templated(directory, template).chat(CHAT) == expected
    named = json.dumps({"chat_template": [{"name": "default", "template": template}], "bos_token": {"content": "<s>"}})
    files = {"tokenizer.json": (directory / "tokenizer.json").read_bytes(), "tokenizer_config.json": named.encode()}
    assert Tokenizer.of(Files({f"tokenizer/{name}": data for name, data in files.items()})).chat(CHAT) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace.__globals__['json'] }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% include 'x' %}",
    ],
)
def test_templates_get_at_nothing(directory, template):
    with pytest.raises(ArgumentInvalid, match="the chat template refuses the messages: "):
        print(templated(directory, template).chat(CHAT))
