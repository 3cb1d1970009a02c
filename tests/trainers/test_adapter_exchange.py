"""Adapters that peft writes for models of every kind, on bundles and back; autocast, padding, groups."""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import aotexport
import aotexport_runtime
from aotexport_runtime import NotSupported, adapters
from tests.refusals import refusal

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
HEAD = {"num_labels": 3, "pad_token_id": 0}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))


def bert() -> tuple[nn.Module, dict[str, Any]]:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **HEAD))
    return model, {"input_ids": tokens(4, 8), "labels": torch.tensor([0, 1, 2, 0])}


def qwen2(*, tied: bool) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.Qwen2Config(num_key_value_heads=2, use_cache=False, tie_word_embeddings=tied, **SIZES)
    return transformers.Qwen2ForCausalLM(config), {"input_ids": tokens(4, 8), "labels": tokens(4, 8).clone()}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, use_cache=False, **sizes))
    return model, {"input_ids": tokens(4, 12), "labels": tokens(4, 12).clone()}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)
    )
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return model, {"pixel_values": pixels, "labels": torch.tensor([0, 4, 2, 1])}


class Grouped(nn.Module):
    """Convolutions in groups: in two, and one per channel."""

    def __init__(self):
        super().__init__()
        self.image, self.line = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Conv1d(8, 8, 3, groups=8, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.line(self.image(x).flatten(2).relu()).square().mean(),)


def grouped() -> tuple[nn.Module, dict[str, Any]]:
    return Grouped(), {"x": torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))}


SEQUENCES, QUERIES = {"task_type": "SEQ_CLS"}, {"target_modules": ["query", "value"]}
WORDS = {"task_type": "CAUSAL_LM", "target_modules": ["embed_tokens", "q_proj"]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen2, tied": (lambda: qwen2(tied=True), WORDS),
    "groups": (grouped, {"target_modules": ["image", "line"]}),
}
SLOW: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPT-2": (gpt2, {"target_modules": "all-linear", "fan_in_fan_out": True, "lora_dropout": 0.1}),
    "ViT": (vit, {"target_modules": ["projection", "q_proj", "fc1", "classifier"], "lora_dropout": 0.1}),
    "BERT, classes": (bert, {**SEQUENCES, **QUERIES}),
}


def made(make: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, kwargs = make()
    return model.train(), kwargs


def losses(module: nn.Module, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the losses of steps of training."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    found = []
    torch.manual_seed(2)
    for _ in range(4):
        loss = module(**kwargs)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def results(module: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        output = module.eval()(**kwargs)
    return [value for value in (output if isinstance(output, tuple) else output.to_tuple()) if value is not None]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.filterwarnings("ignore")
def test_adapter_of_peft_is_read_and_comes_back(name, tmp_path):
    make, options = {**CASES, **SLOW}[name]
    (model, kwargs), config = made(make), peft.LoraConfig(r=8, lora_alpha=16, **options)
    aotexport.export(model, (), kwargs, output=tmp_path / "bundle", verify=False)
    original = made(make)[0]
    torch.manual_seed(1)
    theirs = peft.get_peft_model(original, config)
    expected_losses, expected = losses(theirs, kwargs), results(theirs, kwargs)
    theirs.save_pretrained(tmp_path / "theirs")
    read = aotexport_runtime.load(tmp_path / "bundle", matmul="torch")
    report = adapters.load_adapter(read, tmp_path / "theirs")
    torch.testing.assert_close(results(read, kwargs), expected, rtol=0, atol=1e-6)
    adapters.save_adapter(read, tmp_path / "back")
    back = peft.PeftModel.from_pretrained(made(make)[0], tmp_path / "back")
    torch.testing.assert_close(results(back, kwargs), expected, rtol=0, atol=0)
    ours = aotexport_runtime.load(tmp_path / "bundle", matmul="torch").train()
    heads = [path for path, _ in ours.named_children() if path in (theirs.peft_config["default"].modules_to_save or ())]
    torch.manual_seed(1)
    targets = [target.path for target in report.targets]
    options = {"dropout": config.lora_dropout, "bias": config.bias, "modules_to_save": heads}
    adapters.add_lora(ours, targets, r=8, alpha=16, **options)
    torch.testing.assert_close(losses(ours, kwargs), expected_losses, rtol=0, atol=1e-5)
    adapters.save_adapter(ours, tmp_path / "ours")
    taken = peft.PeftModel.from_pretrained(made(make)[0], tmp_path / "ours")
    torch.testing.assert_close(results(taken, kwargs), results(ours, kwargs), rtol=0, atol=1e-6)


class Words(nn.Module):
    """An embedding with a padding column before a layer that takes one dtype alone."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8, padding_idx=3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = self.words(x)
        return self.out(words).square().mean(), words


@pytest.fixture(scope="module")
def words(new_bundle):
    torch.manual_seed(0)
    return new_bundle(Words(), torch.arange(20).view(4, 5) % 10)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.filterwarnings("ignore")
def test_adapter_of_an_embedding_has_pefts_dtype_and_padding(words, autocast):
    x, found = torch.arange(20).view(4, 5) % 10, []
    torch.manual_seed(0)
    theirs = Words()
    torch.manual_seed(1)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules=["words"])).train()
    ours = aotexport_runtime.load(words, matmul="torch").train()
    torch.manual_seed(1)
    adapters.add_lora(ours, ["words"], r=2, alpha=8)
    for module in (theirs, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, result = module(x)
        loss.backward()
        a, _ = (p for p in module.parameters() if p.requires_grad)
        assert not a.grad[:, 3].any()
        assert result.dtype == torch.float32
        found.append([loss, result, a.grad])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


class Turned(nn.Linear):
    """A layer whose code transposes its weight, as Falcon's does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class Scorer(nn.Module):
    """A language model with bounds on its scores, as Gemma's."""

    def __init__(self):
        super().__init__()
        self.words, self.turned, self.head = nn.Embedding(10, 8), Turned(8, 8), nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.tanh(self.head(torch.relu(self.turned(self.words(x)))) / 3) * 3
        return scores.square().mean(), scores


@pytest.mark.filterwarnings("ignore")
def test_all_linear_means_layers_that_transpose_their_weight_and_none_of_scores(tmp_path):
    kwargs = {"x": torch.arange(20).view(4, 5) % 10}
    aotexport.export(made(lambda: (Scorer(), kwargs))[0], (), kwargs, output=tmp_path / "bundle", verify=False)
    for dora in (False, True):
        theirs, found = made(lambda: (Scorer(), kwargs))[0], []
        torch.manual_seed(1)
        theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=2, target_modules=["turned"], use_dora=dora))
        ours = aotexport_runtime.load(tmp_path / "bundle", matmul="torch").train()
        torch.manual_seed(1)
        report = adapters.add_lora(ours, r=2, alpha=8, use_dora=dora)
        assert [(target.name, target.form, target.kind) for target in report.targets] == [
            ("turned.weight", "graph", "linear")
        ]
        for module in (theirs, ours):
            found.append([losses(module, kwargs), *results(module, kwargs)])
        torch.testing.assert_close(*found, rtol=0, atol=1e-6)
        adapters.merge_adapter(ours)
        torch.testing.assert_close(results(ours, kwargs), found[0][1:], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_peft_adapts_what_it_adapts_of_the_original_or_is_told_what_to_pass(tmp_path):
    make = lambda: qwen2(tied=True)  # noqa: E731
    model, kwargs = made(make)
    aotexport.export(model, (), kwargs, output=tmp_path / "bundle", verify=False)

    def trained(module: nn.Module, config: peft.PeftConfig) -> torch.Tensor:
        torch.manual_seed(1)
        return losses(peft.get_peft_model(module, config), kwargs)

    def loaded() -> nn.Module:
        return aotexport_runtime.load(tmp_path / "bundle", matmul="torch").train()

    def refused(config: peft.PeftConfig) -> str:
        return refusal(NotSupported, trained, loaded(), config)

    assert refused(peft.LoraConfig(target_modules="all-linear")) == (
        "`all-linear` of peft leaves an output layer out on a model of transformers, and adapts `lm_head` of a loaded "
        "bundle. Load the bundle again, and pass `exclude_modules=['lm_head']` too, or names of layers"
    )
    for config in (
        peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]}),
    ):
        assert refused(config) == (
            "peft trains tokens of `model.embed_tokens.weight` and `lm_head.weight` as one on a model of transformers, "
            "and knows ties of bundles by a recipe alone. Load the bundle again, and train whole weights, or export "
            "the model by `--recipe`"
        )
    original = made(make)[0]
    config = {"target_modules": "all-linear", "exclude_modules": ["lm_head"]}
    expected = trained(original, peft.LoraConfig(target_modules="all-linear"))
    torch.testing.assert_close(trained(loaded(), peft.LoraConfig(**config)), expected, rtol=0, atol=1e-6)
