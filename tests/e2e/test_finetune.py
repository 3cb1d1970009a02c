"""`aotexport finetune` on real data: digits, text that Python ships, MiniLM's weights; interrupted and resumed."""

from __future__ import annotations

import functools
import json
import os
import pydoc
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

import aotexport
import aotexport_runtime
from aotexport.cli import app
from aotexport_runtime.finetune.history import History
from tests.forked import run_script


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def bundle(new_bundle: Callable[..., Path]) -> Path:
    """Give a bundle of the untrained network, for up to 512 images of 8 x 8 pixels."""
    shapes = ({0: Dim("batch", min=1, max=512)},)
    return new_bundle(network(), torch.rand(8, 8, 8), dynamic_shapes=shapes)


def finetune(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["finetune", *map(str, arguments)])


def summary(*arguments: Any) -> dict[str, Any]:
    done = finetune(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def losses(directory: Path) -> list[float]:
    lines = (directory / "history.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def test_digits_are_learnt_and_the_tuned_bundle_knows_them(bundle: Path, tmp_path: Path) -> None:
    found = summary(bundle, "--data", "digits", "--lr", "1e-2", "-o", tmp_path / "tuned")
    assert found["epochs"][-1]["accuracy"] > 0.9
    assert (found["kind"], found["steps"], len(losses(Path(found["run"])))) == ("bundle", 153, 153)
    assert Path(found["curves"]).read_bytes().startswith(b"\x89PNG")
    images, labels = digits()
    with torch.no_grad():
        right = aotexport_runtime.load(tmp_path / "tuned").eval()(images).argmax(1) == labels
    assert right.double().mean() > 0.9


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return torch.tensor(data.images[:500] / 16, dtype=torch.float32), torch.tensor(data.target[:500])


def test_interrupted_run_resumes_to_the_same_curve_and_weights(bundle: Path, tmp_path: Path) -> None:
    options = [bundle, "--data", "digits", "--lr", "1e-2", "--epochs", "2", "--lora", "r=4,dropout=0.1", "--whole", "4"]
    summary(*options, "-o", tmp_path / "whole")
    run = tmp_path / "parts.run"
    interrupted(run, 20, *options, "-o", tmp_path / "parts")
    assert 20 <= len(losses(run)) < 102
    assert not (tmp_path / "parts").exists()
    again = finetune(*options, "-o", tmp_path / "parts", "-q")
    assert again.stderr == f"error: `{run}` has an interrupted run; --resume goes on, --force begins anew\n"
    other = finetune(*options, "-o", tmp_path / "parts", "--resume", "--seed", "1")
    assert "has seed 0, and this one 1" in other.stderr
    summary(*options, "-o", tmp_path / "parts", "--resume")
    assert losses(run) == losses(tmp_path / "whole.run")
    one, other = (peft.PeftModel.from_pretrained(network(), tmp_path / name).eval() for name in ("whole", "parts"))
    images = digits()[0]
    assert torch.equal(one(images), other(images))
    assert not (run / "checkpoint.safetensors").exists()


CHECKPOINTS: dict[str, tuple[Any, str]] = {
    "no file": (lambda path: os.mkfifo(path), "there is no checkpoint "),
    "settings": (
        lambda path: _with(path, "settings", lambda _: 1),
        "is no checkpoint of this command: Expected `object`",
    ),
    "step as text": (lambda path: _with(path, "step", lambda _: "x"), "Expected `int`, got `str` - at `$.step`"),
    "step before": (lambda path: _with(path, "step", lambda _: -(10**9)), "Expected `int` >= 0 - at `$.step`"),
    "step behind": (lambda path: _with(path, "step", lambda _: 10**9), "it is at step 1000000000 of 102. Begin anew"),
    "broadcast": (
        lambda path: _with(path, "model.4.weight", lambda w: w[:1, :1]),
        "`model.4.weight` is torch.float32[1, 1]",
    ),
    "dtype": (lambda path: _with(path, "model.4.bias", lambda b: b.int()), "`model.4.bias` is torch.int32["),
    "step of Adam": (
        lambda path: _with(path, "optimizer.4.bias/step", lambda step: step * 0 - 1),
        "`optimizer.4.bias/step` is -1.0, and the run is at step ",
    ),
}


def _with(path: Path, key: str, change: Any) -> None:
    """Change a checkpoint."""
    with safe_open(path.with_name("good"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(file.metadata()["aotexport_run"])
    if key in ("step", "settings"):
        record[key] = change(record[key])
    else:
        tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, path, metadata={"aotexport_run": json.dumps(record)})


def test_checkpoint_that_is_not_of_the_run_is_refused_in_one_line(bundle: Path, tmp_path: Path) -> None:
    options = [bundle, "--data", "digits", "--epochs", "2", "-o", tmp_path / "parts"]
    run, mine = tmp_path / "parts.run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("mine")
    (run / "checkpoint.new").symlink_to(mine)
    interrupted(run, 5, *options)
    assert mine.read_text() == "mine"
    checkpoint = run / "checkpoint.safetensors"
    checkpoint.rename(run / "good")
    for name, (make, message) in CHECKPOINTS.items():
        make(checkpoint)
        done = finetune(*options, "--resume", "-q")
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), name
        assert done.stderr.startswith("error: --resume: "), name
        assert message in done.stderr, name
        checkpoint.unlink()


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "[1]", '{"step": "a", "loss": 1, "lr": 1}', f'{{"step": 1, "lr": 1, "loss": {"9" * 5000}}}']
)
def test_line_of_a_history_that_is_none_ends_it(tmp_path: Path, line: str) -> None:
    kept = '{"step": 1, "loss": 0.5, "lr": 0.1, "examples_per_s": 3}\n'
    (tmp_path / "history.jsonl").write_text(f"{kept}{line}\n{kept}")
    History(tmp_path, steps=5, tensorboard=False).close()
    assert (tmp_path / "history.jsonl").read_text() == kept


def test_link_in_the_place_of_a_history_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "history.jsonl").symlink_to("mine")
    History(tmp_path, steps=5, tensorboard=False).close()
    assert (tmp_path / "mine").read_text() == "mine"


def interrupted(run: Path, steps: int, *arguments: Any) -> None:
    """Run the command until `run` has a history of these steps, and interrupt it."""
    history = run / "history.jsonl"

    def interrupt() -> None:
        while not history.is_file() or len(history.read_bytes().splitlines()) < steps:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    stopped = finetune(*arguments)
    interrupter.join()
    assert stopped.exit_code == 130, stopped.stderr


def test_language_model_learns_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reader, ids = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256)), torch.randint(256, (4, 32))
    aotexport.export(reader, (ids,), output=tmp_path / "b", dynamic_shapes=({0: Dim("batch", max=64)},), verify=False)
    (tmp_path / "book.txt").write_text(Path(pydoc.__file__).read_text()[:40_000])
    options = ["--loss", "causal-lm", "--tokenizer", "bytes", "--lr", "3e-2", "--epochs", "2"]
    found = summary(tmp_path / "b", "--data", tmp_path / "book.txt", *options, "-o", tmp_path / "tuned")
    first, last = (epoch["perplexity"] for epoch in found["epochs"])
    assert last < first < 40


class OwnLoss(nn.Module):
    """Classifies texts of 16 tokens, four at a time, and computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, 16), nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.head((self.words(input_ids) * attention_mask.unsqueeze(-1)).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture(scope="module")
def own_loss(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Give a bundle that computes its loss, with a step, and options that train it on questions and statements."""
    path = tmp_path_factory.mktemp("own")
    torch.manual_seed(0)
    ids = torch.randint(256, (4, 16))
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1, 0])}
    step = "adamw:weight_decay=0.01,clip=True,accumulate=True,outputs='logits'"
    aotexport.export(OwnLoss(), (), kwargs, output=path / "b", step=step, verify=False)
    texts = [text for pair in PAIRS for text in pair]
    rows = [{"text": text, "label": "question" if text.endswith("?") else "statement"} for text in texts * 8]
    (path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--tokenizer", "bytes", "--batch-size", "4", "--lr", "3e-2", "--epochs", "2", "--validation", "0.2"]
    return [path / "b", "--data", path / "texts.jsonl", *options]


def test_model_with_a_loss_of_its_own_learns_classes_of_texts_of_fixed_length(
    own_loss: list[Any], tmp_path: Path
) -> None:
    found = summary(*own_loss, "-o", tmp_path / "tuned")
    assert found["classes"] == ["question", "statement"]
    assert found["epochs"][-1]["accuracy"] > 0.9


def test_whole_steps_learn_what_the_loop_does_interrupted_or_not(own_loss: list[Any], tmp_path: Path) -> None:
    options = [*own_loss, "--accumulate", "3"]
    summary(*options, "-o", tmp_path / "loop")
    summary(*options, "--step", "-o", tmp_path / "whole")
    assert losses(tmp_path / "whole.run") == pytest.approx(losses(tmp_path / "loop.run"), rel=1e-4)
    run = tmp_path / "parts.run"
    interrupted(run, 5, *options, "--step", "-o", tmp_path / "parts")
    summary(*options, "--step", "-o", tmp_path / "parts", "--resume")
    assert losses(run) == losses(tmp_path / "whole.run")
    tuned = [aotexport_runtime.load(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(tensor, tuned[1][name]) for name, tensor in tuned[0].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "r=2"], "--step: --lora: the bundle's program is fixed"),
        (["--weight-decay", "0.1"], "--step: --weight-decay: the bundle's program is fixed"),
        (["--clip", "0"], ""),
    ],
)
def test_options_that_a_step_has_fixed_are_refused(
    own_loss: list[Any], tmp_path: Path, options: list[str], message: str
) -> None:
    done = finetune(*own_loss, "--step", *options, "--epochs", "1", "-o", tmp_path / "tuned", "-q")
    assert done.exit_code == (2 if message else 0), done.stderr
    assert message in done.stderr


class OneInput(nn.Module):
    """Classifies texts of any length, which are its only input."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(256, 16), nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a bundle that reads tokens alone, beside texts of two classes in `texts.jsonl`."""
    path = tmp_path_factory.mktemp("reader")
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=256)},)
    ids = torch.randint(256, (4, 16))
    aotexport.export(OneInput(), (ids,), output=path / "bundle", dynamic_shapes=shapes, verify=False)
    texts = [text for pair in PAIRS for text in pair] * 8
    rows = [{"body": text, "title": "", "label": int(text.endswith("?"))} for text in texts]
    (path / "two.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def test_text_is_the_only_input_of_a_classifier(reader: Path, tmp_path: Path) -> None:
    options = ["--data", reader / "two.jsonl", "--column", "ids=body", "--tokenizer", "bytes", "--batch-size", "8"]
    options += ["--lr", "3e-2", "--epochs", "3", "--validation", "0"]
    found = summary(reader / "bundle", *options, "-o", tmp_path / "tuned")
    assert found["epochs"][-1]["train_loss"] < 0.8 * found["epochs"][0]["train_loss"]


def test_columns_of_parquet_train_and_classes_have_their_names(bundle: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `finetune`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `finetune`")
    images, labels = digits()
    rows = {"pixels": images.flatten(1).tolist(), "label": [f"d{label}" for label in labels]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "digits.parquet")
    options = ["--column", "input=pixels", "--lr", "1e-2", "--epochs", "2", "--validation", "0"]
    found = summary(bundle, "--data", tmp_path / "digits.parquet", *options, "-o", tmp_path / "tuned")
    assert found["classes"] == [f"d{number}" for number in range(10)]
    first, second = (epoch["train_loss"] for epoch in found["epochs"])
    assert second < 0.8 * first


def test_directory_of_a_dataset_trains_validates_on_its_split_and_tensorboard_reads_the_curve(
    bundle: Path, tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `finetune`")
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `finetune`"
    )
    images, labels = digits()
    columns = {"image": images.tolist(), "label": labels.tolist()}
    data = tmp_path / "digits"
    for split, rows in (("train", slice(0, 400)), ("validation", slice(400, 500))):
        save_to_disk(pyarrow, data / split, pyarrow.table({name: values[rows] for name, values in columns.items()}))
    (data / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    options = ["--lr", "1e-2", "--epochs", "3", "--tensorboard"]
    found = summary(bundle, "--data", data, *options, "-o", tmp_path / "tuned")
    assert found["steps"] == 3 * -(-400 // 32)
    assert found["epochs"][-1]["accuracy"] > 0.7
    curve = events.EventAccumulator(found["run"]).Reload()
    assert [event.value for event in curve.Scalars("loss")] == pytest.approx(losses(Path(found["run"])), rel=1e-6)
    assert [event.step for event in curve.Scalars("accuracy")] == [epoch["step"] for epoch in found["epochs"]]


def save_to_disk(pyarrow: Any, directory: Path, table: Any) -> None:
    """Write two files of record batches, as `Dataset.save_to_disk` does."""
    directory.mkdir(parents=True)
    half = len(table) // 2
    names = [f"data-0000{index}-of-00002.arrow" for index in range(2)]
    for name, part in zip(names, (table[:half], table[half:]), strict=True):
        with pyarrow.OSFile(str(directory / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


PAIRS = [
    ("How do I reset my password?", "I forgot my password and cannot log in."),
    ("The parcel has not arrived.", "My delivery is late."),
    ("Can I get a refund?", "I want my money back."),
    ("The app crashes when it starts.", "The program stops as soon as I open it."),
    ("Turn down the music.", "Please make the song less loud."),
    ("The road is closed.", "You cannot drive through this street."),
    ("Open the window.", "Let some fresh air in."),
]


@pytest.fixture(scope="module")
def bounded(new_bundle: Callable[..., Path]) -> Path:
    """Give a bundle that reads 2 to 8 tokens and classifies them by a loss of its own."""
    torch.manual_seed(0)
    ids, sizes = torch.randint(256, (4, 6)), {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=8)}
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1, 0])}
    shapes = {"input_ids": sizes, "attention_mask": sizes, "labels": {0: sizes[0]}}
    return new_bundle(OwnLoss(), kwargs=kwargs, dynamic_shapes=shapes)


LETTERS = "".join(map(chr, range(32, 127)))


@pytest.mark.parametrize(
    "texts", [["a", "b", ""], [LETTERS, "b"]], ids=["shorter than the least", "longer than the greatest"]
)
def test_texts_are_filled_up_and_cut_to_what_the_bundle_takes(bounded: Path, tmp_path: Path, texts: list[str]) -> None:
    for name, kept in ("whole", texts), ("cut", [text[:7] + text[7:][-1:] for text in texts]):
        rows = [json.dumps({"text": text, "label": int(text != "b")}) for text in kept * 4]
        (tmp_path / "texts.jsonl").write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8")
        options = ["--tokenizer", "bytes", "--validation", "0", "--epochs", "1", "-o", tmp_path / name]
        done = finetune(bounded, "--data", tmp_path / "texts.jsonl", *options)
        assert done.exit_code == 0, done.stderr
        assert "note: texts are cut at 8 tokens, as the bundle needs, and not at --length 128\n" in done.stderr
    assert losses(tmp_path / "whole.run") == losses(tmp_path / "cut.run")


# --- kinds of targets -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Reads bytes: scores for each token, and their mean over the text."""

    def __init__(self, size: int, *, of_tokens: bool) -> None:
        super().__init__()
        self.words, self.head, self.of_tokens = nn.Embedding(256, 16), nn.Linear(16, size), of_tokens

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.words(ids))
        if self.of_tokens:
            return scores
        return (scores * attention_mask.unsqueeze(-1)).sum(1) / attention_mask.sum(1, keepdim=True)


TEXTS = [text for pair in PAIRS for text in pair]
KINDS: dict[str, tuple[Reader, list[dict[str, Any]], str]] = {
    "regression": (Reader(1, of_tokens=False), [{"text": t, "label": len(t) / 40} for t in TEXTS], "validation_loss"),
    "multi-label": (
        Reader(2, of_tokens=False),
        [{"text": t, "label": [n for n, mark in (("asks", "?"), ("me", " I ")) if mark in t]} for t in TEXTS],
        "accuracy",
    ),
    "token-classification": (
        Reader(2, of_tokens=True),
        [
            {"id": "x", "words": t.split(), "label": ["name" if w[0].isupper() else "word" for w in t.split()]}
            for t in ("", "", *TEXTS)
        ],
        "accuracy",
    ),
    "completion": (
        Reader(256, of_tokens=True),
        [
            *({"prompt": t, "completion": "??" if t.endswith("?") else "!!"} for t in TEXTS),
            *({"prompt": "x" * 9999, "completion": "lost"}, {"prompt": "", "completion": ""}),
            {"prompt": "\U0001f642", "completion": "\U0001f642" * 99},
        ],
        "perplexity",
    ),
    "pairs": (Reader(16, of_tokens=False), [{"anchor": a, "positive": b} for a, b in PAIRS], "accuracy"),
}
"""Per loss a model, rows, and what is told of the examples held out."""


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Give the options of a run per loss: a bundle, and rows."""
    path = tmp_path_factory.mktemp("readers")

    @functools.cache
    def options(loss: str) -> list[Any]:
        torch.manual_seed(0)
        network, rows, _ = KINDS[loss]
        ids, sizes = torch.randint(256, (4, 16)), {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=256)}
        kwargs = {"ids": ids, "attention_mask": torch.ones_like(ids)}
        shapes = dict.fromkeys(kwargs, sizes)
        aotexport.export(network, (), kwargs, output=path / loss, dynamic_shapes=shapes, verify=False)
        (path / f"{loss}.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
        return [path / loss, "--data", path / f"{loss}.jsonl", "--loss", loss, "--tokenizer", "bytes", "--lr", "3e-2"]

    return options


@pytest.mark.parametrize(
    ("loss", "row", "message"),
    [
        ("multi-label", {"text": "a", "label": [3, 5]}, "{of} 1: expected names of classes, or from 0 to 1"),
        ("regression", {"text": "a", "label": [1, 2]}, "{of} 2: expected as many numbers as in row 1"),
        (
            "token-classification",
            {"words": ["a", None], "label": ["name", "word"]},
            "column `words`, row 2: expected a list of words",
        ),
        ("token-classification", {"ids": [5, 6], "attention_mask": [1, 1], "label": [0]}, "{of} 1: 1 classes for 2"),
        ("completion", {"prompt": None, "completion": "a"}, "{data}, row 2: expected text as in row 1, got 'None'"),
        (
            "completion",
            {"prompt": "", "completion": "a"},
            "--patience waits for a better loss of examples held out, and none",
        ),
    ],
)
def test_row_that_does_not_fit_its_loss_is_told(
    readers: Callable[[str], list[Any]], tmp_path: Path, loss: str, row: dict[str, Any], message: str
) -> None:
    bundle, _, _, *options = readers(loss)
    rows = [row] if loss == "multi-label" or "ids" in row else [{name: KINDS[loss][1][-1][name] for name in row}, row]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    done = finetune(bundle, "--data", data, *options, "--validation", "0", "--patience", "1", "-o", tmp_path / "tuned")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: " + message.format(data=data, of="column `label`, row"))


@pytest.mark.parametrize("loss", KINDS)
def test_kind_of_target_is_learnt_in_mixed_precision(
    readers: Callable[[str], list[Any]], tmp_path: Path, loss: str
) -> None:
    found = summary(*readers(loss), "--epochs", "4", "--autocast", "bfloat16", "-o", tmp_path / "tuned")
    first, last = found["epochs"][0], found["epochs"][-1]
    assert last["train_loss"] < 0.9 * first["train_loss"]
    assert KINDS[loss][2] in last


def test_adapter_that_learns_pairs_is_merged(readers: Callable[[str], list[Any]], tmp_path: Path) -> None:
    options = ["--lora", "r=8", "--layers", "head", "--validation", "0", "--merge", "-o", tmp_path / "tuned"]
    assert summary(*readers("pairs"), *options)["kind"] == "bundle"
    aotexport_runtime.load(tmp_path / "tuned")


def test_accumulated_calls_count_as_one_batch(readers: Callable[[str], list[Any]], tmp_path: Path) -> None:
    options = [*readers("completion"), "--epochs", "1"]
    summary(*options, "--batch-size", "16", "-o", tmp_path / "one")
    summary(*options, "--batch-size", "4", "--accumulate", "4", "-o", tmp_path / "four")
    assert losses(tmp_path / "four.run") == pytest.approx(losses(tmp_path / "one.run"), rel=1e-4)


def test_packed_rows_teach_what_each_of_them_does_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = aotexport.recipe("causal-lm-packed", LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
    train = replace(recipe.programs[0], example=[*recipe.programs[0].variants][-1], variants=())
    aotexport.export(recipe.model, (), programs=[train], output=tmp_path / "b", verify=False)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [tmp_path / "b", "--data", tmp_path / "rows.jsonl", "--loss", "completion", "--tokenizer", "bytes"]
    options += ["--epochs", "3", "--lr", "1e-2", "--validation", "0", "--batch-size", "8"]
    summary(*options, "-o", tmp_path / "alone")
    done = finetune(*options, "--pack", "-o", tmp_path / "packed")
    assert "note: 7 examples are packed in 3 rows\n" in done.stderr
    assert losses(tmp_path / "packed.run") == pytest.approx(losses(tmp_path / "alone.run"), rel=1e-6)
    packed, alone = (load_file(tmp_path / name / "weights/model.safetensors") for name in ("packed", "alone"))
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


def test_packing_that_the_bundle_does_not_serve_is_refused(bounded: Path, tmp_path: Path) -> None:
    write_lines(str(tmp_path / "rows.jsonl"), {"prompt": "a", "completion": "b"})
    options = [bounded, "--data", tmp_path / "rows.jsonl", "--tokenizer", "bytes", "--pack", "-o", tmp_path / "t", "-q"]
    assert finetune(*options, "--loss", "completion").stderr == (
        "error: --pack: no program for training takes `position_ids` that keep packed rows apart. Export the model by "
        "--recipe causal-lm-packed, or leave --pack out\n"
    )
    assert finetune(*options).stderr == (
        "error: --pack packs the rows of --loss completion, and not those of classification\n"
    )


PROCESSES = """
import os, sys

os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv.pop(1)}
child = os.fork()
os.environ["RANK"] = "0" if child else "1"
from aotexport.cli import app
try:
    app(sys.argv[1:])
finally:
    assert not child or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_processes_share_the_calls_of_a_step_and_learn_what_one_does(bundle: Path, tmp_path: Path) -> None:
    options = ["finetune", bundle, "--data", "digits", "--lora", "r=4,dropout=0.1", "--whole", "4", "--epochs", "2"]
    options += ["--batch-size", "128", "--accumulate", "3", "--json", "-o"]  # The last step has one call for two.
    one = summary(*options[1:], tmp_path / "one")
    done = run_script(None, free_port(), *map(str, options), str(tmp_path / "two"), cwd=tmp_path, text=PROCESSES)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two.run") == pytest.approx(losses(tmp_path / "one.run"), rel=1e-5)
    two = json.loads(done.stdout)
    assert two["epochs"] == [pytest.approx(epoch, rel=1e-5) for epoch in one["epochs"]]
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert not (tmp_path / "two.run" / "checkpoint.safetensors").exists()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_best_epoch_is_kept_and_patience_ends_a_run(readers: Callable[[str], list[Any]], tmp_path: Path) -> None:
    bundle, _, _, *options = readers("regression")
    rows = [{"text": text, "label": hash_of(text + str(copy))} for text in TEXTS for copy in range(3)]
    (tmp_path / "noise.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [bundle, "--data", tmp_path / "noise.jsonl", *options, "--schedule", "constant", "--warmup", "0"]
    options += ["--lr", "0.3", "--validation", "0.4"]
    found = summary(*options, "--epochs", "20", "--patience", "2", "-o", tmp_path / "best")
    told = [epoch["validation_loss"] for epoch in found["epochs"]]
    assert found["best"] == told.index(min(told)) + 1 == len(told) - 2 < 18
    summary(*options, "--epochs", str(found["best"]), "--keep", "last", "-o", tmp_path / "last")
    best, last = (aotexport_runtime.load(tmp_path / name).state_dict() for name in ("best", "last"))
    assert all(torch.equal(best[name], last[name]) for name in last)
    assert not list((tmp_path / "best.run").glob("*.safetensors"))


def hash_of(text: str) -> float:
    return zlib.crc32(text.encode()) % 7 - 3.0


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nix.jsonl"], "--data: there is no file or directory 'nix.jsonl'; or write `digits`"),
        (["--data", "no.parquet"], "--data: no.parquet cannot be read: "),
        (["--data", "digits", "--target", "nix"], "digits has no column `nix`; it has `image`, `label`"),
        (
            ["--data", "digits", "--loss", "pairs"],
            "digits has no two columns of text, as pairs need; it has `image`, `label`",
        ),
        (
            ["--data", "digits", "--batch-size", "5000"],
            "--batch-size: the bundle takes 1 to 512 examples in a call, got 5000",
        ),
        (
            ["--data", "digits", "--freeze", "a*"],
            "--freeze: 'a*' matches none of the parameters `1.weight`, `1.bias`, `4.weight`, `4.bias`, ...",
        ),
        (["--data", "digits", "--lr", "1e30", "--clip", "0"], "the loss is nan at step 2; try a lower --lr, or look "),
        (["--data", "ragged.jsonl"], "column `image`, row 2: [2] values; input `input` takes [8, 8]"),
        (["--data", "class.jsonl"], "column `label`, row 1: expected a class (0, 1, ...) or its name, got 0.5"),
        (
            ["--data", "nan.jsonl", "--validation", "0"],
            "the loss is nan at step 1: row 2 of the data holds one that is not finite",
        ),
        (["--data", "ten.jsonl"], "the data has class 10, and the bundle has 10 classes"),
        (
            ["--data", "class.jsonl", "--loss", "seq2seq"],
            "--loss seq2seq wants a bundle that takes `labels`: export it ",
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    image = [0.5] * 64
    write_lines("no.parquet", {})
    write_lines("ragged.jsonl", {"image": image, "label": 1}, {"image": [1, 2], "label": 1})
    write_lines("class.jsonl", {"image": image, "label": 0.5})
    write_lines("nan.jsonl", *({"image": [*image[1:], x], "label": 1} for x in (1, float("nan"), 0)))
    write_lines("ten.jsonl", *({"image": image, "label": 10} for _ in range(9)))
    done = finetune(bundle, *options, "-o", "tuned", "-q")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "tuned").exists()


def write_lines(name: str, *rows: dict[str, Any]) -> None:
    Path(name).write_text("\n".join(json.dumps(row) for row in rows))
