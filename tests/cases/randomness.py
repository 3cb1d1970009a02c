"""Random operators: the same seed gives the same result as eager execution."""

import torch
from torch import nn

from tests.cases import DISAGREES, case, slow_case
from tests.cases.mutations import leaf


@case(lambda: (leaf(4, 4),))
def dropout_that_draws_nothing(x):
    kept, zeroed = nn.functional.dropout(x, 0.0), nn.functional.dropout(x, 1.0)
    return kept, nn.functional.alpha_dropout(x, 0.5, training=False), zeroed, x * torch.rand(4, 4)


@slow_case(lambda: (torch.rand(3, 4),))
def draws_from_distributions(p):
    return torch.bernoulli(p), torch.multinomial(p, 2), torch.normal(p, 1.0), torch.randperm(5)


@case(lambda: (torch.ones(4, 3),))
def random_integers_in_a_range(x):
    x.t().random_(-5, 5)
    return x + torch.empty(3).random_(2, 8), torch.empty(6, 4)[::2].random_(9)


@slow_case(lambda: (leaf(3, 4),))
def unused_draw_advances_the_generator(x):
    torch.rand(3)
    return x * torch.rand(3, 4)


@case(lambda: (leaf(4, 6, 8),))
def feature_and_alpha_dropout(x):
    return nn.functional.dropout1d(x, 0.4), nn.functional.alpha_dropout(x, 0.4), nn.functional.rrelu(x, training=True)


@slow_case(lambda: (torch.randn(3, 2, 4),), programs=("train",), forward_only="the dropout between recurrent layers")
class DropoutWithinRecurrentNetworks(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 3, dropout=0.3, bidirectional=True)
        self.gru = nn.GRU(10, 3, 2, dropout=0.5, batch_first=True)
        self.rnn = nn.RNN(3, 2, 2, dropout=1.0)

    def forward(self, x):
        return self.rnn(self.gru(self.lstm(x)[0])[0])


@slow_case(lambda: (leaf(4, 6),), forward_only=DISAGREES, verify="fast")
def draws_into_other_layouts(x):
    turned = x.t()
    noise = torch.empty_like(turned).bernoulli_(0.4), torch.empty(3, 8)[:, ::2].bernoulli_(0.7)
    dropped = nn.functional.alpha_dropout(turned, 0.4), nn.functional.alpha_dropout(x[:, ::2], 0.4)
    slopes = nn.functional.rrelu(turned, training=True), nn.functional.rrelu(x[:, ::2])
    return *noise, *dropped, *slopes, torch._standard_gamma(turned.exp())
