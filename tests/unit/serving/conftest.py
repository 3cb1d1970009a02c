"""Bundles of small models that servables are made of, exported once; not to be written to."""

import types

import pytest
import torch
from torch import nn
from torch.export import Dim

import aotexport

BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", min=2, max=32)


def digits_model() -> nn.Module:
    """Return a small classifier, always with the same weights, with names for its classes as transformers has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    model.config = types.SimpleNamespace(id2label={0: "low", 2: "high", 1: "<b>mid</b>"})
    return model


class Pair(nn.Module):
    """Nested arguments and results, a constant among them."""

    def forward(self, batch, scale: int):
        a, b = batch["pair"]
        return {"sum": a + b * scale, "parts": [a * 2, (b.to(torch.bfloat16), None)]}


class Attention(nn.Module):
    """Attention over the first axis: rows of it know of each other, those of the second do not."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Words(nn.Module):
    """Adds the vectors of words, which are numbers below 10."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)

    def forward(self, ids):
        return self.words(ids).sum(dim=1)


class Recurrent(nn.Module):
    """Reads sequences of any length, which only the forward graph can hold; steps know of each other, rows do not."""

    def __init__(self):
        super().__init__()
        self.first, self.gru = nn.Linear(4, 6), nn.GRU(6, 6)

    def forward(self, steps):
        return self.gru(self.first(steps))[0]


class Peak(nn.Module):
    """Takes the greatest of what a mask shows, for numbers that are greater than what hides the others."""

    def forward(self, x, mask):
        return (x * 1e5 + (mask == 0) * -1e4).amax(1)


class Masked(nn.Module):
    """Weighs what a mask shows; where it shows nothing, all alike."""

    def forward(self, x, mask):
        return (x.masked_fill(mask == 0, torch.finfo(x.dtype).min).softmax(1) * x).sum(1)


class Kinds(nn.Module):
    """Takes and returns the dtypes that servers have to take care of, and takes a string."""

    def forward(self, flags, half, brain, count, how: str):
        step = {"up": 1, "down": -1}[how]
        return {"flags": ~flags, "half": half * 2, "brain": brain * 2, "count": count + step}


class Counter(nn.Module):
    """Adds to a buffer in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


class Centred(nn.Module):
    """Takes the mean of the batch from each row."""

    def forward(self, x):
        return x - x.mean(dim=0)


class Capacity(nn.Module):
    """Lets each of two experts answer the first eight rows that choose it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(3, 2)

    def forward(self, x):
        p, e = self.gate(x).softmax(-1).max(-1)
        hot = nn.functional.one_hot(e, 2)
        return x + p[:, None] * ((hot.cumsum(0) * hot).sum(-1) <= 8)[:, None]


class Clamped(nn.Module):
    """Divides by the greatest magnitude of the call, where that is above 4."""

    def forward(self, x):
        return x / x.abs().amax().clamp(min=4)


class Blurred(nn.Module):
    """Takes the mean of three pixels, left to right, of a picture."""

    def forward(self, picture):
        return nn.functional.avg_pool2d(picture, (1, 3), stride=1, padding=(0, 1))


class Labelled(nn.Module):
    """Gives scores, and for labels the loss before them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        scores = self.head(x)
        return {"scores": scores} if labels is None else {"loss": (scores - labels).square().mean(), "scores": scores}


MASKED = (
    (torch.linspace(0, 1, 32).reshape(4, 8), torch.ones(4, 8, dtype=torch.int64)),
    ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH}),
)

MODELS = {
    "digits": (digits_model, (torch.linspace(-1, 1, 40).reshape(5, 8),), ({0: BATCH},)),
    "pair": (Pair, ({"pair": (torch.ones(2, 3), torch.arange(6.0).reshape(2, 3))}, 3), None),
    "attention": (
        Attention,
        (torch.rand(6, 3, 8, generator=torch.Generator().manual_seed(0)),),
        ({0: LENGTH, 1: BATCH},),
    ),
    "centred": (Centred, (torch.linspace(0, 1, 12).reshape(4, 3) ** 2,), ({0: BATCH},)),
    "capacity": (Capacity, (torch.linspace(0, 1, 12).reshape(4, 3) ** 2,), ({0: BATCH},)),
    "clamped": (Clamped, (torch.linspace(0, 1, 12).reshape(4, 3) ** 2,), ({0: BATCH},)),
    "recurrent": (
        Recurrent,
        (torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(0)),),
        ({0: LENGTH, 1: BATCH},),
    ),
    "words": (Words, (torch.arange(12).reshape(4, 3) % 10,), ({0: BATCH, 1: LENGTH},)),
    "peak": (Peak, *MASKED),
    "masked": (Masked, *MASKED),
    "kinds": (
        Kinds,
        (torch.tensor([True, False]), torch.ones(3).half(), torch.ones(3).bfloat16(), torch.tensor([1, 2]), "up"),
        None,
    ),
    "blurred": (Blurred, (torch.linspace(0, 1, 3 * 40 * 50).reshape(1, 3, 40, 50) ** 2,), None),
    "labelled": (Labelled, (torch.ones(2, 4), torch.ones(2, 3)), ({0: BATCH}, {0: BATCH})),
    "counter": (Counter, (torch.ones(3),), None),
}


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Return a function from the name of a model to the directory of its bundle."""
    paths = {}

    def export(name):
        if name not in paths:
            make, arguments, sizes = MODELS[name]
            torch.manual_seed(0)
            path = paths[name] = tmp_path_factory.mktemp("served") / name
            module = make().eval()
            aotexport.export(module, arguments, output=path, dynamic_shapes=sizes, programs=("infer",), verify=False)
        return paths[name]

    return export
