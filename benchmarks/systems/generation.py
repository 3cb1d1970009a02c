"""Ways to generate tokens: the loop of transformers over its caches, and that of the runtime over a bundle."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models import Model
from benchmarks.systems.eager import EAGER
from benchmarks.systems.interface import Mode, Prepared, System
from benchmarks.systems.torch_compile import keep_caches

NEW_TOKENS = 64
"""How many tokens each system generates."""


def _prepare(model: Model, directory: Path) -> Prepared:
    import aotexport

    module: Any = model.module()
    recipe = aotexport.recipe("seq2seq" if module.config.is_encoder_decoder else "causal-lm", module)
    aotexport.export(recipe.model, (), programs=recipe.programs, output=directory, force=True)
    return Prepared()


def _load(model: Model, directory: Path, mode: Mode) -> Callable[..., Any]:
    import aotexport_runtime

    module = aotexport_runtime.load(directory).eval()
    start = 0 if "decoder_input_ids" in inspect.signature(module.prefill).parameters else None
    return partial(aotexport_runtime.generate, module, max_new_tokens=NEW_TOKENS, start=start)


def _load_eager(model: Model, directory: Path, mode: Mode, *, cache: str, compiles: bool = False) -> Callable[..., Any]:
    import torch
    from transformers import GenerationConfig

    keep_caches(directory)
    assert EAGER.load is not None
    module: Any = EAGER.load(model, directory, mode)
    # `generate` compiles by itself on accelerators alone.
    if compiles:
        module.forward = torch.compile(module.forward, fullgraph=True)
    module.generation_config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        cache_implementation=cache,
        disable_compile=True,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return module.generate


_GENERATES: Any = frozenset({"generate"})

GENERATE = System(
    "generate", "the runtime's loop over a bundle", artefact="recipe", prepare=_prepare, load=_load, modes=_GENERATES
)

_eager = partial(System, artefact="weights", prepare=EAGER.prepare, exports=False, modes=_GENERATES)

DYNAMIC_CACHE = _eager(
    "dynamic cache", "transformers' generate, keys concatenated", load=partial(_load_eager, cache="dynamic")
)
STATIC_CACHE = _eager(
    "static cache", "transformers' generate, keys written in place", load=partial(_load_eager, cache="static")
)
COMPILED_CACHE = _eager(
    "compiled cache",
    "transformers' generate with a static cache under torch.compile",
    load=partial(_load_eager, cache="static", compiles=True),
)
