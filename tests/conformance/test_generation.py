"""Bundles of `--recipe`: token by token what transformers generates."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner

import aotexport
import aotexport_runtime
from aotexport import ModelFileInvalid
from aotexport.cli import app
from aotexport_runtime import ArgumentInvalid, adapters
from aotexport_runtime.execution.matmul import onednn
from aotexport_runtime.generation.decoder import Decoder
from tests.refusals import refusal

VOCABULARY = 64
PROMPTS = torch.tensor([[0, 0, 5, 9, 3], [7, 2, 8, 1, 4], [0, 6, 6, 2, 9]])
MASK = (PROMPTS != 0).long()
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "gpt2": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64),
    "llama": transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, max_position_embeddings=64, **LLAMA),
    "t5": transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
}
EOS, PAD = 11, 0


class Generator:
    """A model of transformers, and the loaded bundle of it."""

    def __init__(self, kind, path):
        torch.manual_seed(4)
        self.is_seq2seq = kind == "t5"
        automatic = transformers.AutoModelForSeq2SeqLM if self.is_seq2seq else transformers.AutoModelForCausalLM
        self.model = automatic.from_config(CONFIGS[kind]).eval()
        with torch.no_grad():
            # Random weights of the usual size give nearly equal scores.
            for parameter in self.model.parameters():
                parameter.mul_(4 if parameter.dim() > 1 else 1)
        recipe = aotexport.recipe("seq2seq" if self.is_seq2seq else "causal-lm", self.model)
        programs = [program for program in recipe.programs if not program.name.endswith("-base")]
        aotexport.export(recipe.model, (), programs=programs, output=path, verify=False)
        self.path = path
        self.module = aotexport_runtime.load(path).eval()
        self.start = PAD if self.is_seq2seq else None

    def __call__(self, *args, eos=EOS, pads=True, **options):
        options |= ({"start": PAD} if self.is_seq2seq else {}) | ({"pad": PAD} if pads else {})
        return aotexport_runtime.generate(self.module, *args, eos=eos, **options)

    def expected(self, ids, *, eos=EOS, streamer=None, **options):
        config = transformers.GenerationConfig(
            eos_token_id=eos, pad_token_id=PAD, bos_token_id=None, decoder_start_token_id=PAD, **options
        )
        self.model.generation_config = config
        return self.model.generate(ids, attention_mask=options.pop("attention_mask", MASK), streamer=streamer)


@pytest.fixture(
    scope="module",
    params=[pytest.param("gpt2", marks=pytest.mark.slow), "llama", pytest.param("t5", marks=pytest.mark.slow)],
)
def generator(request, tmp_path_factory):
    return Generator(request.param, tmp_path_factory.mktemp(request.param) / "bundle")


DRAWN = {"do_sample": True, "temperature": 1.8}
OPTIONS = {
    "greedy": {},
    "sampled_from_the_best": {**DRAWN, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2},
    "beams": {"num_beams": 3},
    "many_beams": {"num_beams": 7, "length_penalty": -0.5, "repetition_penalty": 1.3},
    "beams_that_stop_early": {"num_beams": 4, "length_penalty": 1.6, "early_stopping": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_of_padded_prompts_are_those_of_transformers(generator, options):
    own = {name: value for name, value in options.items() if value != 0}
    torch.manual_seed(1)
    got = generator(PROMPTS, attention_mask=MASK, max_new_tokens=12, **own)
    torch.manual_seed(1)
    assert torch.equal(got, generator.expected(PROMPTS, max_new_tokens=12, **options))


def test_sequence_that_ends_is_padded_and_the_last_end_stops(generator):
    longest = generator(PROMPTS, attention_mask=MASK, max_new_tokens=12, eos=None)
    prompt = 1 if generator.is_seq2seq else PROMPTS.shape[1]
    ends = sorted({int(row[prompt + 2 + index]) for index, row in enumerate(longest)})
    got = generator(PROMPTS, attention_mask=MASK, max_new_tokens=12, eos=ends)
    assert torch.equal(got, generator.expected(PROMPTS, max_new_tokens=12, eos=ends))
    assert got.shape[1] < longest.shape[1]
    filled = generator(PROMPTS, attention_mask=MASK, max_new_tokens=12, eos=ends, pads=False)
    assert torch.equal(filled[:, prompt:], got[:, prompt:].where(got[:, prompt:] != PAD, ends[0]))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_long_prompt_is_continued_to_the_last_position(generator):
    long, words = PROMPTS.repeat(1, 12)[:, :55] + 1, {"pad_token_id": PAD, "eos_token_id": EOS}
    generator.model.generation_config = transformers.GenerationConfig(decoder_start_token_id=PAD)
    got, expected = (each.generate(long, **words) for each in (generator.module, generator.model))
    assert torch.equal(got, expected)
    assert got.shape[1] == (21 if generator.is_seq2seq else 64)


@pytest.mark.parametrize("early", [{}, {"early_stopping": True}], ids=["by default", "early"])
def test_beams_that_end_at_different_lengths_are_padded(generator, early):
    options = {"num_beams": 2, "max_new_tokens": 14, **early, "eos": [3, 5, 8, 9, 13, 21, 33, 47]}
    got = generator(PROMPTS, attention_mask=MASK, **options)
    assert torch.equal(got, generator.expected(PROMPTS, **options))


ATTENTION = {"gpt2": "c_attn", "llama": "q_proj", "t5": "q"}


@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "lora"])
def test_tuned_bundle_generates_what_transformers_does_with_the_tuned_weights(generator, tmp_path, adapted):
    module, model = aotexport_runtime.load(generator.path, matmul="torch"), copy.deepcopy(generator.model)
    assert list(module.state_dict()) == list(model.state_dict())
    if adapted:
        adapters.add_lora(module, [ATTENTION[model.config.model_type]], r=2)
    labels = PROMPTS[:, 1:] if generator.is_seq2seq else PROMPTS
    given = {"input_ids": PROMPTS, "attention_mask": MASK, "labels": labels.contiguous()}
    optimizer = torch.optim.SGD(
        [each for each in module.parameters() if each.requires_grad], lr=30.0 if adapted else 0.5
    )
    for _ in range(2):
        torch.manual_seed(0)
        loss = module.train()(**given).loss
        loss.backward()
        if not adapted:
            torch.manual_seed(0)
            expected = model.train()(**given).loss
            expected.backward()
            assert torch.equal(loss, expected)
            gradients = dict(model.named_parameters())
            assert all(torch.equal(each.grad, gradients[name].grad) for name, each in module.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        if not adapted:
            model.zero_grad()
            model.load_state_dict(module.state_dict())
    words = {"attention_mask": MASK, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": EOS}
    got = module.eval().generate(PROMPTS, **words)
    if adapted:
        adapters.merge_adapter(module)
        model.load_state_dict({name: module.state_dict()[name] for name in model.state_dict()})
    else:
        aotexport_runtime.save(module, tmp_path / "tuned")
        assert torch.equal(aotexport_runtime.load(tmp_path / "tuned").eval().generate(PROMPTS, **words), got)
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=PAD)
    assert torch.equal(got, model.eval().generate(PROMPTS, **words))
    assert not torch.equal(got, generator.module.generate(PROMPTS, **words))


def test_settings_of_transformers_are_those_of_the_bundle_or_refused(generator):
    words = {"attention_mask": MASK, "max_new_tokens": 6, "pad_token_id": PAD, "eos_token_id": EOS}
    torch.manual_seed(3)
    got = generator.module.generate(input_ids=PROMPTS, do_sample=True, top_k=20, **words)
    torch.manual_seed(3)
    assert torch.equal(got, generator(PROMPTS, attention_mask=MASK, max_new_tokens=6, do_sample=True, top_k=20))
    with pytest.raises(ArgumentInvalid, match="`no_repeat_ngram_size=2` is not supported"):
        generator.module.generate(PROMPTS, no_repeat_ngram_size=2, **words)
    assert (generator.module.config.vocab_size, generator.module.dtype) == (VOCABULARY, torch.float32)
    assert generator.module.get_input_embeddings().weight.shape == (VOCABULARY, 16)


def test_tokens_are_forced_and_scores_processed_as_by_transformers(generator):
    one = PROMPTS[1:2, :1]
    processors = [transformers.NoRepeatNGramLogitsProcessor(2)]
    for beams in (1, 3):
        words = {"max_new_tokens": 9, "num_beams": beams, "pad_token_id": PAD, "eos_token_id": EOS}
        words |= {"bos_token_id": None, "forced_bos_token_id": 0, "forced_eos_token_id": [EOS]}
        got = generator.module.generate(one, logits_processor=processors, **words)
        generator.model.generation_config = transformers.GenerationConfig(decoder_start_token_id=PAD)
        assert torch.equal(got, generator.model.generate(one, logits_processor=processors, **words))
        assert (int(got[0, 1]), int(got[0, -1])) == (0, EOS)


class Heard:
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


def test_streamer_hears_what_that_of_transformers_hears(generator):
    one, mask = PROMPTS[1:2], MASK[1:2]
    mine, theirs = Heard(), Heard()
    generator(one, attention_mask=mask, max_new_tokens=4, streamer=mine)
    generator.model.generation_config = transformers.GenerationConfig(
        eos_token_id=EOS, pad_token_id=PAD, decoder_start_token_id=PAD, max_new_tokens=4
    )
    generator.model.generate(one, attention_mask=mask, streamer=theirs)
    assert mine.values == theirs.values


def test_arguments_out_of_range_are_told_in_whole(generator):
    module, start = generator.module, generator.start
    other = "the model has an encoder; give the token that its decoder begins with, `start`"
    none = "the bundle has no programs `prefill` and `decode`; export the model by `aotexport --recipe causal-lm` or "
    for model, ids, options, message in (
        (module, PROMPTS, {"top_p": 1.5}, "`top_p` must be above 0, and at most 1, got 1.5"),
        (module, PROMPTS, {"max_new_tokens": 0}, "`max_new_tokens` must be above 0, got 0"),
        (module, PROMPTS, {"top_k": 0}, "`top_k` must be None or above 0, got 0"),
        (module, PROMPTS.int(), {}, "`input_ids` must be int64 of two axes, got torch.int32 of 2"),
        (module, PROMPTS[0], {}, "`input_ids` must be int64 of two axes, got torch.int64 of 1"),
        (torch.nn.Linear(2, 2), PROMPTS, {}, none + "`--recipe seq2seq`"),
        (module, PROMPTS, {"start": None}, other)
        if generator.is_seq2seq
        else (module, PROMPTS, {"start": 1}, "`start` is for encoder-decoder models, and this one is causal"),
    ):
        said = refusal(ArgumentInvalid, aotexport_runtime.generate, model, ids, **{"start": start, **options})
        assert said == message


@pytest.mark.parametrize("packs", [False, True])
def test_steps_fill_slots_of_caches_and_give_the_scores_of_decode(generator, monkeypatch, packs):
    monkeypatch.setattr(onednn, "faster_by_onednn", lambda *args: packs)
    module = generator.module
    first = (PROMPTS, MASK, PROMPTS.new_zeros(3, 1)) if generator.is_seq2seq else (PROMPTS, MASK)
    with torch.no_grad():
        _, cache = module.prefill(*first)
        steps, mask, kept = Decoder(module, module.decode, 16), MASK, cache
        for token in (5, 9, 2):
            tokens = PROMPTS.new_full((3, 1), token)
            mask = mask if generator.is_seq2seq else torch.cat([mask, torch.ones_like(tokens)], 1)
            expected, cache = module.decode(tokens, mask, cache)
            scores, kept = steps(tokens, mask, kept)
            assert kept is None
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        assert any(each.is_mkldnn for each in steps._steps._matrices) == packs


def test_functional_graph_serves_the_tokens_that_generation_brings(generator):
    module = generator.module.twin(target="portable").eval()
    aotexport_runtime.generate(module, PROMPTS, attention_mask=MASK, max_new_tokens=4, start=generator.start)
    assert [(run.passes, run.engine) for run in module.explain_program("decode").has_run] == [("forward", "portable")]


def test_model_with_more_tokens_computes_what_that_of_transformers_does(generator):
    module, model = aotexport_runtime.load(generator.path, matmul="torch"), copy.deepcopy(generator.model)
    mean = module.get_input_embeddings().weight.detach().mean(0)
    new = module.resize_token_embeddings(VOCABULARY + 6).weight
    torch.testing.assert_close(new[-6:], mean.expand(6, -1), rtol=0, atol=1e-2)
    assert len(new[-6:].unique(dim=0)) == 6
    read = model.resize_token_embeddings(VOCABULARY + 6).weight
    model.load_state_dict(module.state_dict())
    assert (module.get_output_embeddings().weight is new) == (model.get_output_embeddings().weight is read)
    ids = PROMPTS + MASK * 58
    given = {"input_ids": ids, "attention_mask": MASK, "labels": ids.where(MASK != 0, -100)}
    for each in (module.train(), model.train()):
        torch.manual_seed(0)
        each(**given).loss.backward()
    assert torch.equal(new.grad, read.grad)
    words = {"attention_mask": MASK, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": EOS}
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=PAD)
    assert torch.equal(module.eval().generate(ids, **words), model.eval().generate(ids, **words))


def test_trainer_predicts_by_generating_as_with_the_model(generator, tmp_path):
    model, module = copy.deepcopy(generator.model), aotexport_runtime.load(generator.path).eval()
    model.generation_config = transformers.GenerationConfig.from_dict(module.generation_config.to_dict())
    model.config.pad_token_id = module.config.pad_token_id = PAD
    rows = [{"input_ids": ids, "attention_mask": MASK[1], "labels": ids} for ids in PROMPTS + 3]
    options = transformers.Seq2SeqTrainingArguments(tmp_path, predict_with_generate=True, use_cpu=True, report_to=[])
    wanted, got = (transformers.Seq2SeqTrainer(each, options).predict(rows, max_length=9) for each in (model, module))
    assert (got.predictions == wanted.predictions).all()
    assert got.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_preferences_are_learned_as_by_peft(generator):
    if generator.is_seq2seq:
        pytest.skip("answers follow on prompts")
    dpo = runpy.run_path(str(Path(__file__).parents[2] / "examples/chat/dpo.py"))
    rows = [[([5, 9], [3, 7, 2]), ([4], [8, 1])], [([5, 9], [1, 1]), ([4], [6, 2, 9])]]
    model, module = copy.deepcopy(generator.model).train(), aotexport_runtime.load(generator.path).train()
    targets = [ATTENTION[model.config.model_type]]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])
    theirs, losses = peft.get_peft_model(model, config).eval(), []
    torch.manual_seed(0)
    adapters.add_lora(module.eval(), targets, r=2, alpha=4)
    for each in (theirs, module):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(4):
            if each is module:
                loss = dpo["dpo_loss"](module, *rows)
            else:
                with torch.no_grad(), theirs.disable_adapter():
                    before = dpo["scores"](theirs, [*rows[0], *rows[1]])
                ratios = dpo["scores"](theirs, [*rows[0], *rows[1]]) - before
                loss = -torch.log(torch.sigmoid(0.1 * (ratios[:2] - ratios[2:]))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], abs=1e-6)
    assert losses[-1] < losses[4]


def test_recipe_of_another_kind_of_model_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
    said = refusal(ModelFileInvalid, aotexport.recipe, "seq2seq", model)
    assert said == "recipe `seq2seq` takes an encoder-decoder model of transformers, got `GPT2LMHeadModel`"


ALONE = """
import sys
sys.modules["transformers"] = sys.modules["aotexport"] = None
import json, torch, aotexport_runtime
module = aotexport_runtime.load(sys.argv[1]).eval()
prompts, mask = map(torch.tensor, json.loads(sys.argv[2]))
print(aotexport_runtime.generate(module, prompts, attention_mask=mask, max_new_tokens=9).tolist())
"""


@pytest.mark.slow
def test_saved_model_generates_by_the_command_line_and_without_transformers(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    model.save_pretrained(tmp_path / "saved")
    words = [str(tmp_path / "saved"), "--recipe", "causal-lm", "-o", str(tmp_path / "bundle"), "--fast"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    call = json.dumps([PROMPTS.tolist(), MASK.tolist()])
    command = [sys.executable, "-c", ALONE, str(tmp_path / "bundle"), call]
    got = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    model.generation_config = transformers.GenerationConfig(max_new_tokens=9, pad_token_id=PAD)
    assert got == model.generate(PROMPTS, attention_mask=MASK).tolist()
