"""Key-value caches of fixed size, as model libraries keep them: tensors of plain objects, buffers of the model too."""

import copy

import pytest
import torch
import transformers
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import aotexport
import aotexport_runtime

TOKENS = (3, 5, 9, 11)


@pytest.fixture(scope="module")
def model():
    """Return a small Llama with its cache, which keeps what earlier calls wrote."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    llama.generation_config = transformers.GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=16,
        cache_config={"batch_size": 1, "max_cache_len": 16},
    )
    return TorchExportableModuleWithStaticCache(llama, batch_size=1, max_cache_len=16, device=torch.device("cpu"))


def _step(token, position):
    return {"input_ids": torch.tensor([[token]]), "cache_position": torch.tensor([position])}


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    """Return its bundle, exported as it is by default."""
    path = tmp_path_factory.mktemp("caches") / "bundle"
    aotexport.export(model, (), _step(1, 0), output=path)
    return path


@pytest.mark.parametrize("target", ["portable", "autograd"])
def test_static_cache_over_several_calls_equals_eager(model, bundle, target):
    eager, module = copy.deepcopy(model), aotexport_runtime.load(bundle, target=target).eval()
    for position, token in enumerate(TOKENS):
        with torch.no_grad():
            torch.testing.assert_close(module(**_step(token, position)), eager(**_step(token, position)))
    torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))


def test_static_cache_has_a_program_with_gradients(model, bundle):
    eager, module = copy.deepcopy(model).train(), aotexport_runtime.load(bundle).train()
    for each in (eager, module):
        each(**_step(7, 0)).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in eager.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in module.named_parameters()}, expected)
