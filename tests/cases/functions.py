"""Custom autograd functions. Their backward is never the derivative of their forward, so that a lost one shows."""

import torch
from torch.autograd.function import once_differentiable

from tests.cases import case, slow_case
from tests.cases.mutations import leaf, non_leaf


class Scale(torch.autograd.Function):
    """x * k, with a saved intermediate, a number and a tensor on the context."""

    @staticmethod
    def forward(ctx, x, w, k):
        y = x.exp()
        ctx.save_for_backward(w, None, y)
        ctx.k, ctx.x = k, x
        return y * w * k

    @staticmethod
    def backward(ctx, grad):
        w, nothing, y = ctx.saved_tensors
        assert nothing is None
        x_grad = grad * y * w * ctx.k * 3 + ctx.x if ctx.needs_input_grad[0] else None
        w_grad = (grad * y).sum(0) if ctx.needs_input_grad[1] else None
        return x_grad, w_grad, None


@slow_case(lambda: (leaf(3, 4), leaf(4)))
def function_with_saved_intermediates(x, w):
    return Scale.apply(x, w, 2.0)


class WithSetup(torch.autograd.Function):
    """In the style of `setup_context`, with a default argument."""

    @staticmethod
    def forward(x, y, factor=3.0):
        return x * y * factor, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y, output[1])

    @staticmethod
    def backward(ctx, first, second):
        x, y, total = ctx.saved_tensors
        return first * y * ctx.factor + total, second * x, None


@slow_case(lambda: (leaf(3, 4), leaf(3, 4)), forward_only="does not say with which outputs it comes")
def function_with_setup_context(x, y):
    a, b = WithSetup.apply(x, y)
    return a, b.sin()


class SeesUndefined(torch.autograd.Function):
    """Two outputs whose gradients come as None where undefined."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3, x.argsort(-1)

    @staticmethod
    def backward(ctx, first, second, indices):
        assert indices is None
        if first is None and second is None:
            return None
        if first is None:
            return second * 100
        return first * 10 if second is None else first + second


@case(lambda: (leaf(3, 4),), forward_only="takes undefined gradients")
def function_that_sees_undefined_gradients(x):
    first, second, indices = SeesUndefined.apply(x)
    return first, second, indices


class InPlace(torch.autograd.Function):
    """Writes its input, and says so."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x.mul_(y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * 5, grad.sum()


@case(lambda: (non_leaf(3, 4), torch.randn((), requires_grad=True)))
def function_in_place_on_an_input(x, y):
    return InPlace.apply(x, y) * 2


class Marked(torch.autograd.Function):
    """One output is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y, x * 3, 7, None

    @staticmethod
    def backward(ctx, unused, grad, number, nothing):
        assert (number, nothing) == (None, None)
        return grad * 11 + unused


@slow_case(lambda: (leaf(3, 4),))
def function_with_a_non_differentiable_output(x):
    first, second, number, nothing = Marked.apply(x)
    assert nothing is None
    return first, second * number


class Views(torch.autograd.Function):
    """Returns a view of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return (grad * 4).view(3, 4)


@slow_case(lambda: (leaf(3, 4),))
def function_that_returns_a_view(x):
    return Views.apply(x)


class Same(torch.autograd.Function):
    """Returns its input as it is."""

    @staticmethod
    def forward(ctx, x, y):
        return y, x

    @staticmethod
    def backward(ctx, first, second):
        return second * 2, first * 3


@case(lambda: (leaf(3, 4), leaf(3, 4)))
def function_that_returns_its_inputs(x, y):
    first, second = Same.apply(x * 1, y * 1)
    return first * 2, second


class Once(torch.autograd.Function):
    """Must not be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad.contiguous() if not grad.is_contiguous() else grad) * x


@case(lambda: (leaf(3, 4),))
def function_to_be_differentiated_once(x):
    return Once.apply(x).sum()


class Regions(torch.autograd.Function):
    """Differentiates again in its backward, as functions that recompute do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w).sin()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = (again @ w.detach()).sin()
            (x_grad,) = torch.autograd.grad(y, again, grad)
        return x_grad * 2, x.t() @ grad


@slow_case(lambda: (leaf(3, 4), leaf(4, 2)))
def function_that_recomputes(x, w):
    return Regions.apply(x, w)


class Amp(torch.autograd.Function):
    """For mixed precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


@case(lambda: (leaf(3, 4),))
def function_for_mixed_precision(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Amp.apply(x)
    return y.float() + Amp.apply(x)


@slow_case(
    lambda: (leaf(3, 4), leaf(4)),
    forward_only="does not say with which outputs it comes",
    dynamic_shapes={"x": {0: torch.export.Dim("n")}, "w": None},
)
def function_of_dynamic_sizes(x, w):
    return Scale.apply(x, w, 2.0), Sized.apply(x)


class Sized(torch.autograd.Function):
    """Keeps a size for its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.count = x.shape[0]
        return x.sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.count, -1) * ctx.count


class Draws(torch.autograd.Function):
    """Draws random numbers in its forward and not in its backward."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad * mask * 2


@slow_case(lambda: (leaf(30, 4),))
def function_that_draws(x):
    return Draws.apply(x) + torch.rand(4)


@case(lambda: (leaf(3, 4), leaf(4)))
def function_in_a_branch(x, w):
    return torch.cond(x.sum() > 0, lambda x, w: Scale.apply(x, w, 2.0), lambda x, w: x * w, (x, w))


@case(lambda: (leaf(3, 4), leaf(4), torch.tensor([2, 1])), forward_only="registers hooks")
def function_and_hook_beside_branches_on_values(x, w, counts):
    y = Scale.apply(x, w, 2.0)
    y.register_hook(lambda grad: grad * 3)
    if y.isfinite().all():
        y = y.sin()
    for _ in range(counts.max().item()):
        y = Scale.apply(y, w, 0.5)
    return y


class Counting(torch.autograd.Function):
    """Scales its gradients by the number of inputs that need one."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x * w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        count = sum(ctx.needs_input_grad)
        return grad * w * count, (grad * x).sum(0) * count, grad.sum(0) * count


@slow_case(lambda: (leaf(3, 4), torch.randn(4), leaf(4)))
def function_that_counts_what_is_needed(x, w, b):
    return Counting.apply(x, w, b)


class WithoutGradientOfTheFirst(torch.autograd.Function):
    """Refuses to be differentiated with regard to its first input, as kernels of Gaussian processes do."""

    @staticmethod
    def forward(ctx, x, w, b):
        if any(ctx.needs_input_grad[:1]):
            raise RuntimeError("it has no gradient with regard to `x`")
        ctx.save_for_backward(x)
        return x * w + b

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, (grad * x).sum(0) * 3, grad.sum(0)


@case(lambda: (torch.randn(3, 4), leaf(4), leaf(4)))
def function_without_gradient_of_the_first(x, w, b):
    return WithoutGradientOfTheFirst.apply(x, w, b)


class LeavingOut(torch.autograd.Function):
    """Leaves out the gradients that are not needed, and what it would save for them."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        return x * w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        x_grad = w_grad = b_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad * w * 2
        if ctx.needs_input_grad[1]:
            w_grad = torch.zeros_like(w).add_((grad * x).sum(0))
        if ctx.needs_input_grad[2]:
            b_grad = grad.sum(0)
        return x_grad, w_grad, b_grad


class Accumulating(torch.autograd.Function):
    """Adds its gradient to a tensor."""

    @staticmethod
    def forward(ctx, x, total):
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.total.add_(grad.detach())
        return grad * 2, None


@case(lambda: (leaf(3, 4),), forward_only="a backward pass of the model changes what the call returns")
def function_whose_backward_adds_to_a_result(x):
    total = torch.zeros(3, 4)
    return Accumulating.apply(x * 2, total), total[1:]


class MultiplyingByNumPy(torch.autograd.Function):
    """Applies itself in its backward, for the gradients that are needed."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.tensor(x.detach().numpy() * y.detach().numpy())

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        needs_x, needs_y = ctx.needs_input_grad
        by_y = MultiplyingByNumPy.apply(grad, y) if needs_x else None
        return by_y, MultiplyingByNumPy.apply(grad, x) if needs_y else None


@slow_case(lambda: (leaf(3, 4), leaf(3, 4)))
def function_that_applies_itself_in_its_backward(x, y):
    return MultiplyingByNumPy.apply(x, y)
