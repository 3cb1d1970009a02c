"""Recurrent layers over sequences of any length, and packed sequences."""

import torch
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.cases import slow_case

BATCH = Dim("batch", min=2, max=8)
LENGTH = Dim("length", min=4, max=12)
WHOLE = "has a dynamic number of steps"


@slow_case(
    lambda: (torch.randint(0, 10, (2, 5)), torch.randn(4, 2, 2), torch.randn(4, 2, 3)),
    dynamic_shapes=({0: BATCH, 1: LENGTH}, {1: BATCH}, {1: BATCH}),
    forward_only=WHOLE,
)
class RecurrenceOfAnyLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True, dropout=0.2, proj_size=2)
        self.gru = nn.GRU(4, 3, bias=False)
        self.rnn = nn.RNN(3, 2, nonlinearity="relu", bidirectional=True)

    def forward(self, ids, hidden, cell):
        y, states = self.lstm(self.embedding(ids), (hidden, cell))
        z, last = self.gru(y.transpose(0, 1))
        return self.rnn(z)[0].transpose(0, 1) + y, last, states


@slow_case(
    lambda: (torch.randn(4, 3, 2), torch.tensor([4, 2, 2])), forward_only=WHOLE, members=lambda: {"rnn": nn.RNN(2, 3)}
)
def packed_sequences_of_a_fixed_batch(self, x, lengths):
    packed, last = self.rnn(pack_padded_sequence(x, lengths))
    return pad_packed_sequence(packed, padding_value=-1.0)[0], last
