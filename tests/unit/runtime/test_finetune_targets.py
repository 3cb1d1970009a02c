"""What rows of text shall teach: classes of words, and answers within conversations."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aotexport_runtime.errors import DataInvalid
from aotexport_runtime.finetune.table import Table
from aotexport_runtime.finetune.targets import IGNORED, Classes, answers_of, of_first_tokens
from aotexport_runtime.finetune.tokenizer import BYTES, Tokenizer
from tests.refusals import refusal

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endif %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}THOUGHT {% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that shows what a model thought in the last answer alone, if `THOUGHT` is in it."""
HELLO = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Grüezi 🙂"}]
BYE = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Adieu"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a tokenizer of bytes and marks as transformers writes it."""
    path = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    marks = ["<|user|>", "<|assistant|>"]
    own = PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", pad_token="<pad>", additional_special_tokens=marks
    )
    own.chat_template = TEMPLATE.replace("THOUGHT ", "")
    own.save_pretrained(path / "plain")
    own.chat_template = TEMPLATE
    own.save_pretrained(path / "thinks")
    return path


def taught(tokenizer: Tokenizer, columns: dict[str, Any], names: dict[str, str] | None = None) -> list[tuple[str, int]]:
    """Return per text what its targets say, and its row."""
    found, marked = answers_of(Table("data", columns), names or {}, tokenizer)
    encoded = tokenizer.encode([each.text for each in found], marked=marked)
    targets = [[t for t in each.targets(own) if t != IGNORED] for each, own in zip(found, encoded, strict=True)]
    return [
        (tokenizer._own._tokens.decode(own, skip_special_tokens=False), each.row)
        for own, each in zip(targets, found, strict=True)
    ]


def test_conversation_without_a_template_is_refused(directory: Path) -> None:
    for source in (BYTES, str(directory / "plain/tokenizer.json")):
        told = refusal(DataInvalid, taught, Tokenizer(source, "data"), {"messages": [HELLO]})
        assert told.startswith(f"data, row 1: --tokenizer: {source} has no chat template, which messages need: give ")


def test_answers_of_conversations_and_prompts_are_taught_alone(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory / "plain"), "data")
    both = [*HELLO, *BYE]
    assert taught(tokenizer, {"messages": [both, BYE]}) == [("Grüezi 🙂</s>Adieu</s>", 1), ("Adieu</s>", 2)]
    assert taught(tokenizer, {"prompt": [both[:3]], "completion": [both[3:]]}) == [("Adieu</s>", 1)]
    texts = {"q": ["Hello? ", "", "x"], "completion": ["Grüezi", "", "end</s>"]}
    assert taught(tokenizer, texts, {"prompt": "q"}) == [("Grüezi</s>", 1), ("", 2), ("end</s>", 3)]


def test_template_that_changes_earlier_answers_gives_a_text_per_answer(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory / "thinks"), "data")
    assert taught(tokenizer, {"messages": [[*HELLO, *BYE]]}) == [("THOUGHT Grüezi 🙂</s>", 1), ("THOUGHT Adieu</s>", 1)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"text": ["a"]},
            "data has neither `messages` nor `prompt` and `completion`; name them: --column prompt=COLUMN",
        ),
        (
            {"messages": [HELLO, "Hello"]},
            "data, row 2: expected a list of messages with `role` and `content`, got 'Hello'",
        ),
        ({"messages": [HELLO[:1]]}, "data, row 1: the conversation has no message of the role `assistant`"),
        (
            {"messages": [[{"role": "tool", "content": "x"}, *HELLO]]},
            "data, row 1: the chat template refuses the messages: no tool",
        ),
        ({"prompt": ["a", "b"], "completion": ["c", 4]}, "data, row 2: expected text as in row 1, got '4'"),
    ],
)
def test_rows_without_answers_are_told(directory: Path, columns: dict[str, Any], message: str) -> None:
    assert refusal(DataInvalid, taught, Tokenizer(str(directory / "plain"), "data"), columns).startswith(message)


@pytest.mark.parametrize("source", ["plain", BYTES])
def test_first_token_of_a_word_has_its_class(directory: Path, source: str) -> None:
    tokenizer = Tokenizer(source if source == BYTES else str(directory / source), "data")
    [encoded] = tokenizer.encode([["no", "ü"]], marked=False, in_words=True)
    tags = Classes([["b", "a"]], "tags", several=True).numbers(["b", "a"], 1)
    assert of_first_tokens(encoded, tags) == [1, IGNORED, 0, IGNORED]


@pytest.mark.parametrize(
    ("values", "several", "message"),
    [
        ([[1, 0], 2], False, "column `label`, row 1: expected a class (0, 1, ...) or its name, got [1, 0]"),
        (["a", {"a": 1}], False, "column `label`, row 2: expected the name of a class, got {'a': 1}"),
        (["a", None], False, "column `label`, row 2: expected the name of a class, got None"),
        ([["a"], "a"], True, "column `label`, row 2: expected a list of classes, got 'a'"),
        ([[0], None], True, "column `label`, row 2: expected a list of classes, got 'None'"),
    ],
)
def test_class_of_another_kind_is_told(values: list[Any], several: bool, message: str) -> None:
    classes = Classes(values, "label", several=several)
    with pytest.raises(DataInvalid) as caught:
        [classes.numbers(value, row) for row, value in enumerate(values, 1)]
    assert str(caught.value) == message
