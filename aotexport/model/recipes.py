"""Recipes: the programs by which a model of transformers generates, for `aotexport_runtime.generate`.

The programs take and return keys and values as plain tensors. transformers is needed at the export alone.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from aotexport.errors import ModelFileInvalid
from aotexport.model.programs import Example, Program
from aotexport.model.source import ModelSource, load_target

RECIPES = ("causal-lm", "seq2seq")

Layers = list[tuple[torch.Tensor, ...]]
"""Keys and values per layer; of an encoder-decoder model, those of the encoded tokens after them."""

_BATCH, _PROMPT = 2, 4
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """What to export so that a bundle generates.

    Attributes:
        model: a module with the methods `prefill` and `decode`.
        programs: one of each, with their example calls; `aotexport.export(recipe.model, (), programs=recipe.programs)`.
    """

    model: nn.Module
    programs: tuple[Program, ...]


def recipe(name: str, model: nn.Module) -> Recipe:
    """Return the programs by which a model generates.

    Args:
        name: `causal-lm` or `seq2seq`.
        model: a model of transformers with a head for tokens; put in eval mode.

    Raises:
        ModelFileInvalid: there is no such recipe, or the model reads something else than tokens, or keeps something
            else than keys and values.
    """
    if name not in RECIPES:
        raise ModelFileInvalid(f"there is no recipe `{name}`; there are {', '.join(RECIPES)}")
    config: Any = getattr(model, "config", None)
    if config is None or bool(getattr(config, "is_encoder_decoder", False)) != (name == "seq2seq"):
        wanted = "an encoder-decoder model" if name == "seq2seq" else "a causal language model"
        raise ModelFileInvalid(f"recipe `{name}` takes {wanted} of transformers, got `{type(model).__name__}`")
    read = getattr(model, "main_input_name", "input_ids")
    if read != "input_ids":
        raise ModelFileInvalid(
            f"recipe `{name}` takes models that read tokens, and `{type(model).__name__}` reads `{read}`. Export its "
            "encoder and its decoder as programs of their own"
        )
    made: Any = Seq2Seq(model) if name == "seq2seq" else CausalLM(model)
    made.eval()
    ids = torch.arange(1, 1 + _BATCH * _PROMPT).reshape(_BATCH, _PROMPT) % 8
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    tokens = ids[:, :1].contiguous()
    first = (ids, mask, tokens) if name == "seq2seq" else (ids, mask)
    with torch.no_grad():
        _, cache = made.prefill(*first)
        grown = mask if name == "seq2seq" else torch.cat([mask, torch.ones_like(tokens)], 1)
        _, cache = made.decode(tokens, grown, cache)
    longest = min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST)
    batch, prompt, past = Dim("batch", min=1), Dim("prompt", min=1, max=longest), Dim("past", min=1, max=longest - 1)
    grown = mask if name == "seq2seq" else torch.cat([grown, torch.ones_like(tokens)], 1)
    keys = ({0: batch, 2: past},) * 2 + ({0: batch, 2: prompt},) * 2 * (name == "seq2seq")
    sizes = {0: batch, 1: prompt if name == "seq2seq" else past + 1}
    begins = Example(first, dynamic_shapes=({0: batch, 1: prompt},) * 2 + ({0: batch},) * (name == "seq2seq"))
    goes_on = Example((tokens, grown, cache), dynamic_shapes=({0: batch}, sizes, [keys] * len(cache)))
    return Recipe(
        made,
        (Program("prefill", method="prefill", example=begins), Program("decode", method="decode", example=goes_on)),
    )


def load_recipe(name: str, where: str) -> ModelSource:
    """Return the source of an export by a recipe.

    Args:
        name: see `recipe`.
        where: a directory that `save_pretrained` of transformers wrote, or a model file, whose `model` is such a model.

    Raises:
        ModelFileInvalid: the model cannot be loaded, or does not fit the recipe.
    """
    if Path(where, "config.json").is_file():
        import transformers

        automatic: Any = transformers.AutoModelForSeq2SeqLM if name == "seq2seq" else transformers.AutoModelForCausalLM
        model, root = automatic.from_pretrained(where), Path(where)
    else:
        model, root = load_target(where)
    found = recipe(name, model)
    return ModelSource(where, found.model, Example(), root, found.programs)


class CausalLM(nn.Module):
    """A causal language model, in two steps over keys and values as tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.options = _options(model)

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the next token, (batch, vocabulary), and keys and values of the prompt."""
        from transformers.cache_utils import DynamicCache

        return self._step(input_ids, attention_mask, DynamicCache())

    def decode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Layers
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the token after `input_ids`, (batch, 1), and the longer keys and values."""
        return self._step(input_ids, attention_mask, _cache(cache))

    def _step(self, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Layers]:
        options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in self.options else {}
        if "position_ids" in self.options:
            options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options[_cache_name(self.options)] = cache
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **options)
        return output.logits[:, -1], list(zip(*_kept(cache), strict=True))


class Seq2Seq(nn.Module):
    """An encoder-decoder model, in two steps over keys and values as tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the first token after `decoder_input_ids`, (batch, 1), and keys and values."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        encoder: Any = self.model.get_encoder()  # type: ignore[operator]
        encoded = encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return self._step(decoder_input_ids, attention_mask, encoded, cache)

    def decode(
        self, decoder_input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: Layers
    ) -> tuple[torch.Tensor, Layers]:
        """Return the scores of the token after `decoder_input_ids`, (batch, 1), and the longer keys and values."""
        from transformers.cache_utils import EncoderDecoderCache

        # What the encoder gave is read by its keys and values alone.
        config: Any = self.model.config
        encoded = cache[0][2].new_zeros((*attention_mask.shape, config.hidden_size))
        caches = _cache([layer[:2] for layer in cache]), _cache([layer[2:] for layer in cache])
        return self._step(decoder_input_ids, attention_mask, encoded, EncoderDecoderCache(*caches))

    def _step(
        self, ids: torch.Tensor, mask: torch.Tensor, encoded: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Layers]:
        from transformers.modeling_outputs import BaseModelOutput

        output = self.model(
            decoder_input_ids=ids,
            attention_mask=mask,
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),  # type: ignore[arg-type]
            use_cache=True,
            return_dict=True,
            **{_cache_name(_options(self.model)): cache},
        )
        own, others = _kept(cache.self_attention_cache), _kept(cache.cross_attention_cache)
        return output.logits[:, -1], list(zip(*own, *others, strict=True))


def _options(model: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)


def _cache_name(options: tuple[str, ...]) -> str:
    """Return what the model calls its cache: `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in options else "past_key_values"


def _cache(layers: Any) -> Any:
    """Return a cache of transformers over these keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _kept(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the keys and the values of a cache, per layer; refuse one that keeps something else."""
    for layer in cache.layers:
        if type(layer).__name__ != "DynamicLayer" or not layer.is_initialized:
            raise ModelFileInvalid(
                f"the model keeps a `{type(layer).__name__}` from token to token, and recipes take models that keep "
                "keys and values"
            )
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
