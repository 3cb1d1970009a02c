"""What reaches which gradient."""

import torch
from torch import nn

from tests.cases import DISAGREES, case, slow_case
from tests.cases.mutations import leaf


@slow_case(lambda: (leaf(3), leaf(3), leaf(3)))
def several_outputs_of_several_inputs(a, b, c):
    return a * b, b * c, (a + c).sum()


@slow_case(lambda: (leaf(3, 4),))
def region_with_grad_inside_no_grad(x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
        c = x * 4
    return a, b, c


@case(lambda: (leaf(5, 4), torch.tensor([0, 3, 1, 2, 0])))
def cross_entropy(x, target):
    return nn.functional.cross_entropy(x, target), x.softmax(-1)


@case(lambda: (leaf(4, 4),))
def backward_that_checks_for_errors(x):
    return torch.linalg.eigvals(x).abs()


@slow_case(lambda: (leaf(4, 4),), forward_only=DISAGREES, verify="fast")
def backward_that_checks_values(x):
    return torch.linalg.eig(x)


@case(lambda: (leaf(3, 4),))
def reductions(x):
    return x.mean(), x.var(0), x.logsumexp(1), x.norm(), x.prod(), x.cumsum(0), x.amax(1)


@case(lambda: (leaf(3, 4),))
def sort_and_topk(x):
    return x.sort(dim=1), torch.topk(x, 2), x.max(1), x.median(0)


@slow_case(lambda: (torch.randn(8, 16),))
class AutocastDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).transpose(0, 1).float()


@slow_case(
    lambda: (torch.randn(8, 16),), forward_only=DISAGREES, verify="fast", members=lambda: {"layer": nn.Linear(16, 16)}
)
def weight_used_twice_under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = self.layer(self.layer(x).relu())
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return self.layer(self.layer(hidden).relu())


@case(lambda: (torch.randn(6, 4, dtype=torch.float16).t().requires_grad_(),))
def dropout_of_half_precision(x):
    return torch.dropout(x, 0.3, True)


@case(lambda: (torch.randn(4, dtype=torch.complex64, requires_grad=True),))
def complex_numbers(x):
    return (x * (1 + 2j)).conj(), torch.fft.fft(x).abs()


@slow_case(lambda: (leaf(3, 4),), forward_only="does not say with which outputs it comes")
def gradients_that_are_zero_for_every_tangent(x):
    return torch.angle(x), x * 2


@case(lambda: (leaf(3, 3),))
def sign_that_requires_grad(x):
    spd = x @ x.t() + 3 * torch.eye(3)
    return torch.sign(spd), spd.sum()


@case(lambda: (torch.tensor([1, 4, 2, 0, 3]), torch.tensor([0, 2, 3])), members=lambda: {"bag": nn.EmbeddingBag(5, 3)})
def bags_by_offsets(self, tokens, offsets):
    """Offsets must ascend: the kernel reads past its memory otherwise."""
    return self.bag(tokens, offsets)


@slow_case(
    lambda: (torch.randn(5, 4),),
    members=lambda: {"layers": nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 1))},
)
def forces_of_an_energy(self, x):
    """Gradients of its own, through operators that keep what they computed inside of them."""
    x = x * 1 + 0 * self.layers[0].bias.sum()
    energy = self.layers(x).sum()
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -gradient


@case(lambda: (leaf(4),))
def gradient_without_a_graph(x):
    (gradient,) = torch.autograd.grad((x**3).sum(), x)
    return x * gradient


@slow_case(lambda: (leaf(3),))
def region_in_inference_mode(x):
    with torch.inference_mode():
        scale = x * 2
    return scale.clone() * x


@case(lambda: (leaf(3),), forward_only="calls `requires_grad_`")
def factory_that_requires_grad(x):
    made = torch.zeros(3, requires_grad=True), x.new_ones(3, requires_grad=True), nn.Parameter(x.detach())
    return x * torch.ones(3, requires_grad=True), *made, nn.Parameter(x.detach(), requires_grad=False) * x


@case(lambda: (leaf(3, 4),))
def integers_like_a_leaf(x):
    return x * torch.randint_like(x, 5)


@case(lambda: (torch.tensor([0, 2, 1]),), forward_only="_sparse_coo_tensor_with_dims_and_tensors")
class SparseGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, tokens):
        return self.embedding(tokens) * 2
