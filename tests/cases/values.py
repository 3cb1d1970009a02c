"""Code and operators that depend on the values of tensors: branches, numbers taken off, sizes that only data know."""

import torch
from torch import nn

from tests.cases import case, slow_case
from tests.cases.dynamic import LOGGER
from tests.cases.mutations import leaf


@case(lambda: (leaf(3, 4), torch.tensor(3)))
def loop_over_a_number(x, steps):
    for step in range(steps.item()):
        x = x * 1.5 + step
    return x


@case(lambda: (leaf(4), torch.tensor(2)))
def branch_after_a_write(x, count):
    y = x * 2
    y.add_(1)
    LOGGER.debug(f"{count} of {y.max()} in {y.long()}")
    if count.item() * 2 > 3 and y.abs().max().item() < 1e6:
        y = y * y.max().item()
    return y


@slow_case(lambda: (torch.randn(5), torch.zeros(5)))
def branch_between_writes_to_an_argument(x, total):
    total.add_(x.abs())
    if total.min() >= 0:
        total.mul_(2)
    return total.sum()


@case(lambda: (leaf(3), torch.zeros(3)))
def equal_tensors(x, y):
    return (x + 1 if torch.equal(y, y.abs()) else x - 1), torch.allclose(x, x + 1)


@slow_case(lambda: (torch.tensor([0, 3, 1]), leaf(6, 2), torch.tensor(2)))
def operators_that_read_values(classes, x, start):
    return nn.functional.one_hot(classes), x.narrow(0, start, 3), torch.combinations(x[:, 0])


@case(lambda: (torch.randn(4, 3),), programs=("train",), members=lambda: {"norm": nn.BatchNorm1d(3, momentum=None)})
def cumulative_batch_norm(self, x):
    return self.norm(x)


def _speech():
    log_probs = torch.randn(6, 2, 5).log_softmax(-1).requires_grad_()
    return log_probs, torch.randint(1, 5, (2, 3)), torch.tensor([6, 5]), torch.tensor([3, 2])


@case(_speech)
def sequence_loss_with_lengths_as_tensors(log_probs, targets, input_lengths, target_lengths):
    return nn.functional.ctc_loss(log_probs, targets, input_lengths, target_lengths)


@case(lambda: (leaf(5, 3), torch.randn(5, 2)))
def least_squares(a, b):
    return torch.linalg.lstsq(a, b, driver="gelsd").solution


@slow_case(lambda: (torch.tensor([1.0, -2.0, 3.0, 0.5], requires_grad=True), leaf(4)))
def chosen_rows_with_gradients(x, y):
    chosen = x[x > 0] * 2
    return chosen * chosen, (chosen.outer(y) ** 2).sum(), y.masked_select(x > 0).sum()


@slow_case(lambda: (torch.tensor(3), leaf(4)))
def checked_length_with_gradients(n, x):
    k = n.item()
    torch._check(k >= 1)
    torch._check(k <= 4)
    return x[:k].exp() * torch.ones(k)


@slow_case(lambda: (leaf(5, 4), torch.tensor([0, 2, 0, 2, 2])))
class Experts(nn.Module):
    """Experts by name, each for the tokens that chose it."""

    def __init__(self):
        super().__init__()
        for index in range(3):
            self.add_module(f"expert_{index}", nn.Linear(4, 4))

    def forward(self, x, choice):
        mask = nn.functional.one_hot(choice, 3).unsqueeze(1).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for expert in mask.sum(dim=(-1, -2)).greater(0).nonzero():
            _, tokens = torch.where(mask[expert].squeeze(0))
            y.index_add_(0, tokens, getattr(self, f"expert_{expert[0]}")(x[tokens]))
        return y


@slow_case(lambda: (leaf(5, 4), torch.tensor([1, 1, 1, 1, 1])))
class OneExpertOfSeveral(Experts):
    pass
