"""Torch's functions that take plain integers, with a dynamic size for each: equal to eager, or refused."""

import re

import pytest
import torch
from torch.export import Dim
from torch.nn import functional

import aotexport
import aotexport_runtime
from aotexport.capture.effects.sizes_as_integers import FUNCTIONS
from aotexport.torch_internals.calls import tree_leaves

EXAMPLE = 12
SIZES = (EXAMPLE, 7, 9, 16)


def _pool(axes, name, *options):
    """Return a function that pools the last of so many axes; an option is of that axis, made of its size."""
    pool, one = getattr(functional, f"{name}_pool{axes}d"), (1,) * (axes - 1)
    neutral = (one, one, (0,) * (axes - 1), one)

    def call(x, n):
        given = [(*rest, option(n)) for rest, option in zip(neutral, options, strict=False)]
        return pool(x[(None,) * (axes - 1)], *given)

    return call


def _pools(axes):
    lasting, half = lambda n: 2, lambda n: n // 2
    rows = {}
    for name in ("avg", "max"):
        operator = f"{name}_pool{axes}d"
        rows[f"{operator}.kernel_size"] = _pool(axes, name, lambda n: n)
        rows[f"{operator}.stride"] = _pool(axes, name, lasting, lambda n: n // 3)
        rows[f"{operator}.padding"] = _pool(axes, name, half, lasting, lambda n: n // 4)
    rows[f"max_pool{axes}d.dilation"] = _pool(axes, "max", lasting, lasting, lambda n: 0, lambda n: n // 3)
    pool = getattr(functional, f"max_pool{axes}d_with_indices")
    first = (None,) * (axes - 1)
    rows[f"max_pool{axes}d_with_indices.kernel_size"] = lambda x, n: pool(x[first], (*(1 for _ in first), n // 2), 1)
    return rows


def _round_trip(x, n, **options):
    window = torch.hann_window(4)
    return torch.istft(torch.stft(x, 4, window=window, return_complex=True), 4, window=window, **options)


SERVED = {
    **_pools(1),
    **_pools(2),
    **_pools(3),
    "adaptive_avg_pool1d.output_size": lambda x, n: functional.adaptive_avg_pool1d(x, n // 3),
    "as_tensor.t": lambda x, n: x * torch.as_tensor(n),
    "combinations.self": lambda x, n: (torch.combinations(x[0]), torch.combinations(x[1], 3, with_replacement=True)),
    "diag.diagonal": lambda x, n: torch.diag(x[0], n // 3),
    "diag_embed.offset": lambda x, n: torch.diag_embed(x, n // 3),
    "diagonal.offset": lambda x, n: (torch.diagonal(x, n // 3), x.diagonal(n - 4)),
    "fft_fftfreq.n": lambda x, n: (x * torch.fft.fftfreq(n), torch.fft.fftfreq(n + 1, 0.1, dtype=torch.float64)),
    "fft_rfftfreq.n": lambda x, n: (x[:, 1:] * 2, torch.fft.rfftfreq(n), torch.fft.rfftfreq(n + 1, 0.1)),
    "hann_window.window_length": lambda x, n: (x * torch.hann_window(n), x * torch.hann_window(n, periodic=False)),
    "im2col.kernel_size": lambda x, n: functional.unfold(x[None, None], (2, n // 2)),
    "im2col.stride": lambda x, n: functional.unfold(x[None, None], 2, stride=(1, n // 3)),
    "im2col.padding": lambda x, n: functional.unfold(x[None, None], 2, padding=(1, n // 3)),
    "im2col.dilation": lambda x, n: functional.unfold(x[None, None], 2, dilation=(1, n // 3)),
    "istft.length": lambda x, n: _round_trip(x, n, length=n),
    "linspace.steps": lambda x, n: x * torch.linspace(0, 1, n),
    "one_hot.num_classes": lambda x, n: x * functional.one_hot(x.argmax(1), n),
    "pixel_shuffle.upscale_factor": lambda x, n: functional.pixel_shuffle(x[0].expand(n**2, 2, n), n),
    "pixel_unshuffle.downscale_factor": lambda x, n: functional.pixel_unshuffle(x[None, :1].expand(1, n, n), n),
    "stft.n_fft": lambda x, n: torch.stft(x, n // 2, 1, window=torch.hann_window(n // 2), return_complex=True),
    "stft.hop_length": lambda x, n: torch.stft(x, 4, n // 4, window=torch.hann_window(4), return_complex=True),
    "stft.win_length": lambda x, n: x.stft(5, 1, n // 4, torch.ones(n // 4), return_complex=True),
    "tensor.t": lambda x, n: x * torch.tensor(n),
    "tril_indices.row": lambda x, n: x[:, torch.tril_indices(n, n)[0]],
    "tril_indices.col": lambda x, n: x[:, torch.tril_indices(4, n, -1)[1]],
    "tril_indices.offset": lambda x, n: x[:, torch.tril_indices(n, 3, offset=-(n // 3))[0]],
    "triu_indices.row": lambda x, n: x[:, torch.triu_indices(n, n, offset=1)[1]],
    "triu_indices.col": lambda x, n: x[:, torch.triu_indices(4, n, 1)[1]],
    "triu_indices.offset": lambda x, n: x[:, torch.triu_indices(3, n, offset=n // 3, dtype=torch.int32)[1]],
    "unfold.size": lambda x, n: x.unfold(1, n // 2, 1),
    "unfold.step": lambda x, n: x.unfold(1, 2, n // 3),
}
"""What equals eager for other sizes, by operator and argument."""

REFUSED = {
    "logspace.steps": lambda x, n: x * torch.logspace(0, 1, n),
    "chunk.chunks": lambda x, n: torch.chunk(x, n, 1),
    "diff.n": lambda x, n: torch.diff(x, n - 9),
    "group_norm.num_groups": lambda x, n: functional.group_norm(x.t()[None], n),
    "kaiser_window.window_length": lambda x, n: x * torch.kaiser_window(n),
    "matrix_power.n": lambda x, n: torch.matrix_power(x[:, :3], n),
    "polygamma.n": lambda x, n: torch.polygamma(n - 9, x.abs() + 1),
}
"""What is refused with the name of the function, by operator and argument."""


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("avg_pool1d", (torch.randn(2, 9), 3)),
        ("avg_pool2d", (torch.randn(2, 3, 9, 8), (3, 2), (2, 1), (1, 0))),
        ("avg_pool3d", (torch.randn(2, 7, 9, 8), (3, 2, 4), (2, 1, 3), (1, 0, 2))),
        ("adaptive_avg_pool1d", (torch.randn(2, 9), 4)),
        *(("fft_fftfreq", (n, 0.5)) for n in (5, 6)),
        *(("fft_rfftfreq", (n, 0.5)) for n in (5, 6)),
        *(("hann_window", (5, periodic)) for periodic in (True, False)),
    ],
)
def test_function_that_takes_sizes_equals_torchs_for_plain_integers(name, args):
    torch.testing.assert_close(FUNCTIONS[name](*args), getattr(torch.ops.aten, name)(*args))


def _export(function, path):
    axes = {1: Dim("n", min=4, max=40)}
    model = lambda x: function(x, x.shape[1])  # noqa: E731
    x = torch.randn(3, EXAMPLE, requires_grad=True)
    aotexport.export(model, (x,), output=path, dynamic_shapes=(axes,), verify=False)
    return model


def _called(function, size, *, grad):
    torch.manual_seed(size)
    x = torch.randn(3, size, requires_grad=grad)
    results = [value for value in tree_leaves(function(x)) if isinstance(value, torch.Tensor)]
    losses = [(value.abs() * torch.rand(value.shape)).sum() for value in results if value.requires_grad]
    return results, torch.autograd.grad(losses, x, allow_unused=True) if losses else None


QUICK = ("linspace.steps", "max_pool1d.kernel_size", "stft.n_fft")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[pytest.mark.slow] * (row not in QUICK)) for row in SERVED])
def test_integer_made_of_a_size_equals_eager_for_other_sizes(row, tmp_path):
    model = _export(SERVED[row], tmp_path / "bundle")
    for target in ("auto", "portable", "autograd"):
        module = aotexport_runtime.load(tmp_path / "bundle", target=target)
        for size in SIZES:
            for grad in (True, False):
                expected = _called(model, size, grad=grad)
                got = _called(module, size, grad=grad)
                torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5, check_stride=True)
                torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-5)
                assert [one.requires_grad for one in got[0]] == [one.requires_grad for one in expected[0]]


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row != "polygamma.n")) for row in REFUSED]
)
def test_integer_made_of_a_size_is_refused_with_the_function_that_asks_for_it(row, tmp_path):
    with pytest.raises(aotexport.ExportFailed) as caught:
        _export(REFUSED[row], tmp_path / "bundle")
    name = row.partition(".")[0].removeprefix("linalg_").removeprefix("special_")
    assert re.fullmatch(
        rf"\S+:\d+: in <lambda>: `x`: axis 1 was declared dynamic as `n`, and the model works only for size 12, "
        rf"since `torch\.([a-z.]*\.)?{name}` asks for the number itself\. Write it with operators that take sizes, or "
        "leave this axis static",
        str(caught.value),
    )
