"""Key-value caches of transformers as arguments and results, by their fields."""

import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache, StaticCache

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid

BATCH, PAST, NEW, SOURCE = (Dim(name, min=1, max=32) for name in ("batch", "past", "new", "source"))
KEYS, SOURCE_KEYS = {0: BATCH, 2: PAST}, {0: BATCH, 2: SOURCE}


class Decoder(nn.Module):
    """A language model that writes to its cache."""

    def __init__(self, **more):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 64}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.MistralConfig(**sizes, **heads, **{"sliding_window": None, **more})
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()

    def forward(self, ids, cache):
        return self.model(input_ids=ids, cache=cache, use_cache=True).logits


def _filled(decoder, cache, batch, past):
    with torch.no_grad():
        decoder(torch.arange(batch * past).reshape(batch, past) % 32, cache)
    return cache


def _checked_over_calls(decoder, module, caches, batch, news):
    mine, eagers = caches
    for new in news:
        ids = torch.randint(32, (batch, new))
        with torch.no_grad():
            torch.testing.assert_close(module(ids, mine), decoder(ids, eagers))
        torch.testing.assert_close(_contents(mine), _contents(eagers))


def _contents(cache):
    return [(layer.keys, layer.values, getattr(layer, "cumulative_length", 0)) for layer in cache.layers]


def test_dynamic_cache_grows_from_call_to_call_as_in_eager(new_bundle):
    decoder = Decoder()
    example = (torch.zeros(2, 3, dtype=torch.long), _filled(decoder, DynamicCache(), 2, 4))
    shapes = {"ids": {0: BATCH, 1: NEW}, "cache": {"layers": [{"keys": KEYS, "values": KEYS}]}}
    module = aotexport_runtime.load(new_bundle(decoder, *example, programs=["infer"], dynamic_shapes=shapes)).eval()
    caches = [_filled(decoder, DynamicCache(), 3, 7) for _ in range(2)]
    _checked_over_calls(decoder, module, caches, 3, (2, 1, 5))


def test_static_cache_is_written_in_place_as_in_eager(new_bundle):
    decoder = Decoder()
    cache = lambda: _filled(decoder, StaticCache(decoder.model.config, max_cache_len=12), 2, 3)  # noqa: E731
    example = (torch.zeros(2, 1, dtype=torch.long), cache())
    module = aotexport_runtime.load(new_bundle(decoder, *example, programs=["infer"])).eval()
    caches = [cache(), cache()]
    memory = caches[0].layers[0].keys
    _checked_over_calls(decoder, module, caches, 2, (1, 1, 1))
    assert caches[0].layers[0].keys is memory


@pytest.mark.slow
def test_sliding_window_is_served_before_and_after_it_is_full_and_refused_between(load):
    decoder = Decoder(sliding_window=6)
    cache = lambda past: _filled(decoder, DynamicCache(config=decoder.model.config), 2, past)  # noqa: E731
    layer = {"keys": KEYS, "values": KEYS, "cumulative_length": PAST}
    shapes = {"ids": {0: BATCH, 1: None}, "cache": {"layers": [layer]}}
    full = {"keys": {0: BATCH}, "values": {0: BATCH}, "cumulative_length": Dim("seen", min=6, max=1000)}
    ids = torch.zeros(2, 1, dtype=torch.long)
    later = aotexport.Example((ids, cache(9)), dynamic_shapes={**shapes, "cache": {"layers": [full]}})
    module = load(
        decoder, ids, cache(2), variants=[later], programs=["infer"], dynamic_shapes=shapes, target="auto"
    ).eval()
    _checked_over_calls(decoder, module, [cache(2), cache(2)], 2, (1, 1))
    _checked_over_calls(decoder, module, [cache(9), cache(9)], 2, (1, 1, 1))
    with pytest.raises(CallInvalid, match="the call does not fit program `infer`:"):
        module(torch.zeros(2, 3, dtype=torch.long), cache(4))
