"""Whether the rows of a batch know of each other: read off a program's forward graph, operator by operator. No torch.

`analysis.row_axes` says along which axes calls could be joined, as far as sizes tell; `dependence`, why they may not.
"""
