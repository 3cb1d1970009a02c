"""Served models whose calls are joined: joined calls of any rows are answered as each alone."""

import pytest
import torch
from torch import nn

from aotexport_runtime.serving.servable import Servable

transformers = pytest.importorskip("transformers", reason="needs the extra `examples`")
BATCH, MOST = torch.export.Dim("batch", min=1, max=32), 32
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
PICTURE = TEXT | {"image_size": 16, "patch_size": 8, "num_labels": 5}


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.conv, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, pixel_values):
        x = nn.functional.max_pool2d(self.norm(self.stem(pixel_values)).relu(), 2)
        x = nn.functional.relu_(x + self.norm(self.conv(x)))
        return self.out(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Tagger(nn.Module):
    """An LSTM over words, which answers for each."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)

    def forward(self, input_ids, attention_mask):
        return self.lstm(self.words(input_ids) * attention_mask[..., None])[0].log_softmax(-1)


def of_transformers(name, auto, **fields):
    config = transformers.AutoConfig.for_model(name, **fields)
    config.use_cache = False
    return getattr(transformers, f"AutoModel{auto}").from_config(config)


MODELS = {
    "bert": (lambda: of_transformers("bert", "", **TEXT), "text"),
    "distilbert": (lambda: of_transformers("distilbert", "", vocab_size=50, dim=16, n_layers=1, n_heads=2), "text"),
    "gpt2": (
        lambda: of_transformers("gpt2", "ForCausalLM", vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_inner=16),
        "text",
    ),
    "llama": (lambda: of_transformers("llama", "ForCausalLM", **TEXT), "text"),
    "vit": (lambda: of_transformers("vit", "ForImageClassification", **PICTURE), "pictures"),
    "residual": (Residual, "pictures"),
    "tagger": (Tagger, "text"),
}


def rows(kind, count, seed, scale=1.0):
    torch.manual_seed(seed)
    if kind == "pictures":
        return {"pixel_values": torch.randn(count, 3, 16, 16) * scale}
    mask = torch.arange(6) < torch.randint(2, 7, (count, 1))
    return {"input_ids": torch.randint(3, 50, (count, 6)), "attention_mask": mask.long()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_joined_calls_of_any_rows_are_answered_as_alone(name, new_bundle):
    torch.manual_seed(0)
    make, kind = MODELS[name]
    example = rows(kind, 3, 0)
    sizes = {name: {0: BATCH} for name in example}
    bundle = new_bundle(make().eval(), kwargs=example, dynamic_shapes=sizes, programs=("infer",))
    servable = Servable(bundle, max_batch_size=MOST, max_latency_ms=600_000)
    servable.warm_up()
    assert servable.batch_axes is not None, servable.not_joined
    one, most = rows(kind, 1, 1, 100.0), rows(kind, 16, 2)
    reversed_ = {key: value.flip(0) for key, value in most.items()}
    for calls in ([one, most, rows(kind, 15, 3, 1e-3)], [most, reversed_], [one] * MOST):
        for call, answer in zip(calls, [servable.submit(call) for call in calls], strict=True):
            assert answer.result() is not None
            assert answer.batch_size == MOST
            alone = servable.infer(call)
            for key, value in answer.result().items():
                torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-4 * float(alone[key].abs().max()))
    servable.close()
