"""The inference graph of calls without labels, taken from that with them, beside the one that AOTAutograd gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from torch import nn

import aotexport
from aotexport.encode.fewer_results import with_functional_of

TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert():
    config = transformers.BertConfig(**TEXT, intermediate_size=32, num_labels=3)
    return transformers.BertForSequenceClassification(config), torch.randint(0, 3, (4,))


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config), torch.randint(0, 50, (4, 6))


def dropping():
    """A model in training mode at inference: it draws random numbers."""

    class Dropping(Labelled):
        def forward(self, input_ids, labels=None):
            return super().forward(nn.functional.dropout(input_ids * 1.0), labels)

    return labelled(Dropping)


def labelled(kind):
    return kind(), torch.randint(0, 3, (4, 6))


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, x):
        return torch.stack([x * self.scale, x + self.scale, x - self.scale], 1)

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids * 1.0)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Writing(Labelled):
    """Writes into tensors of its own."""

    def logits(self, x):
        return super().logits(x.mul_(2)).relu_()


class Convolving(Labelled):
    """Has a graph that serves small batches: torch chooses a kernel by their size."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def logits(self, x):
        return super().logits(self.convolution(x[:, None])[:, 0])


class Counting(Labelled):
    """Changes its state."""

    def logits(self, x):
        self.calls += 1
        return super().logits(x)


class Viewing(Labelled):
    """Returns a view of its state."""

    def logits(self, x):
        return self.scale.expand(x.shape[0], 3, x.shape[1])


class Casting(Labelled):
    """Returns other values without labels."""

    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        return found * 2 if labels is None else found


class Rewriting(Labelled):
    """Writes into what it has returned, with labels."""

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids * 1.0)
        return logits if labels is None else (logits.mul(2).sum(), logits.add_(1))


class Drawing(Labelled):
    """Draws random numbers for the loss."""

    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        return found if labels is None else (found[0] * torch.rand(()), found[1])


class Branching(Labelled):
    """Asks for another size with labels."""

    def forward(self, input_ids, labels=None):
        if labels is not None and input_ids.shape[1] > 40:
            input_ids = input_ids[:, :40]
        return super().forward(input_ids, labels)


def taken(monkeypatch, model, labels, folder):
    """Export with graphs that are taken, and with traced ones; return the programs of both, and how many were taken."""
    torch.manual_seed(0)
    sizes = {"input_ids": {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=64)}}
    kwargs = {"input_ids": torch.randint(0, 50, (4, 6)), "labels": labels}
    sizes["labels"] = dict(list(sizes["input_ids"].items())[: labels.dim()])
    found, reports = [], []

    def spied(whole, part):
        found.append(with_functional_of(whole, part))
        return found[-1]

    for name, take in (("taken", spied), ("traced", lambda whole, part: None)):
        monkeypatch.setattr("aotexport.pipeline.capture_program.with_functional_of", take)
        reports.append(aotexport.export(model, (), kwargs, dynamic_shapes=sizes, output=folder / name))
    own, traced = ([p for p in report.programs if p.record.name == "infer.2"] for report in reports)
    assert len(found) == len(own) == len(traced) == 1
    return own[0], traced[0], found[0] is not None


@pytest.mark.parametrize(
    "make", [bert, gpt2, dropping, *(partial(labelled, kind) for kind in (Labelled, Writing, Convolving))]
)
def test_taken_graph_is_that_of_aotautograd(make, monkeypatch, tmp_path):
    own, traced, is_taken = taken(monkeypatch, *make(), tmp_path)
    assert is_taken
    assert own.record == traced.record
    assert own.record.functional is not None
    assert own.graphs == traced.graphs


@pytest.mark.parametrize("kind", [Counting, Viewing, Casting, Rewriting, Drawing, Branching])
def test_graph_is_traced_where_more_differs_than_results(kind, monkeypatch, tmp_path):
    own, traced, is_taken = taken(monkeypatch, *labelled(kind), tmp_path)
    assert not is_taken
    assert own.graphs == traced.graphs
