"""Hugging Face's `Trainer` over a loaded bundle, unmodified and with its defaults, beside the same run of the model."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EvalPrediction, Trainer, TrainingArguments

from aotexport_runtime import load
from tests.trainers.digits import Text, make_reader, make_writer
from tests.trainers.test_peft import assert_same_adapters

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")

NOT_COMPARED = ("runtime", "per_second", "total_flos", "train_loss")
"""What depends on the machine, and on whether the run was resumed."""


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_of(model: Any, directory: Path, **options: Any) -> Trainer:
    defaults = {"num_train_epochs": 2, "per_device_train_batch_size": 32, "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(directory, **{**defaults, **options})
    return Trainer(model, arguments, train_dataset=Text(0, 96), eval_dataset=Text(192, 224), compute_metrics=accuracy)


def trained(model: Any, directory: Path, **options: Any) -> Trainer:
    trainer = trainer_of(model, directory, **options)
    trainer.train()
    return trainer


def history(trainer: Trainer) -> list[dict[str, float]]:
    """Return what the trainer logged, without what is not compared."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]


def assert_same_history(trainer: Trainer, expected: Trainer) -> None:
    logged, wanted = history(trainer), history(expected)
    assert [sorted(entry) for entry in logged] == [sorted(entry) for entry in wanted]
    for entry, other in zip(logged, wanted, strict=True):
        assert entry == pytest.approx(other, rel=1e-4)


def assert_same_weights(module: Any, model: Any) -> None:
    torch.testing.assert_close(module.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-5)


def test_trainer_trains_evaluates_predicts_and_loads_the_best_as_with_the_model(reader, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    options |= {"learning_rate": 1e-3, "metric_for_best_model": "accuracy", "greater_is_better": False}
    expected = trained(make_reader(), tmp_path / "model", **options)
    trainer = trained(load(reader), tmp_path / "bundle", **options)
    assert trainer.label_names == ["labels"]
    assert_same_history(trainer, expected)
    assert [entry for entry in history(trainer) if "eval_accuracy" in entry]
    assert trainer.state.best_global_step == expected.state.best_global_step > 0
    assert_same_weights(trainer.model, expected.model)
    wanted, got = expected.predict(Text(256, 288)), trainer.predict(Text(256, 288))
    assert got.predictions == pytest.approx(wanted.predictions, abs=1e-5)
    assert (got.label_ids == wanted.label_ids).all()
    trainer.save_model(tmp_path / "saved")
    make_reader().from_pretrained(tmp_path / "saved", config=make_reader().config)


def test_trainer_resumes_a_bundle_from_a_checkpoint(reader, tmp_path):
    whole = trained(make_reader(), tmp_path / "model", save_steps=3)
    trained(load(reader), tmp_path / "bundle", save_steps=3)
    for name in ("bundle", "model"):
        trainer = trainer_of(load(reader), tmp_path / "rest", save_steps=3)
        trainer.train(resume_from_checkpoint=tmp_path / name / "checkpoint-3")
        assert_same_history(trainer, whole)
        assert_same_weights(trainer.model, whole.model)


def test_trainer_accumulates_gradients_in_bfloat16_as_with_a_model_that_does_not_count_items(reader, tmp_path):
    options = {"gradient_accumulation_steps": 3, "bf16": True, "use_cpu": True, "save_strategy": "no"}
    model = make_reader()
    model.accepts_loss_kwargs = False
    expected = trained(model, tmp_path / "model", **options)
    assert_same_history(trained(load(reader), tmp_path / "bundle", **options), expected)


def test_trainer_weighs_tokens_and_resumes_among_noisy_embeddings_as_with_the_model(writer, tmp_path):
    options = {"save_steps": 2, "max_steps": 4, "neftune_noise_alpha": 5.0}
    options |= {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    rows = [{"input_ids": row, "labels": row.clone()} for row in torch.arange(96).reshape(12, 8) * 7 % 61]
    for index, row in enumerate(rows):
        row["labels"][: index % 9] = -100

    def run(module: Any, name: str, checkpoint: Path | None = None) -> Trainer:
        arguments = TrainingArguments(tmp_path / name, logging_steps=1, disable_tqdm=True, **options)
        trainer = Trainer(module, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    expected, trainer = run(make_writer(), "model"), run(load(writer, matmul="torch"), "bundle")
    assert_same_history(trainer, expected)
    ids, labels = (rows[0][name][None] for name in ("input_ids", "labels"))
    counted = trainer.model.eval()(ids, torch.ones_like(ids), labels, num_items_in_batch=14).loss
    assert counted.item() == pytest.approx(trainer.model(input_ids=ids, labels=labels).loss.item() / 2)
    saved, wanted = (load_file(tmp_path / name / "checkpoint-2/model.safetensors") for name in ("bundle", "model"))
    torch.testing.assert_close(saved, wanted, rtol=0, atol=1e-6)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "bundle/checkpoint-4"), expected.model)
    for name in ("bundle", "model"):
        rest = run(load(writer, matmul="torch"), "rest", tmp_path / name / "checkpoint-2")
        assert_same_history(rest, expected)
        assert_same_weights(rest.model, expected.model)


OF_TRANSFORMERS = {
    "LoRA": {"target_modules": ["c_attn", "c_fc"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
    "DoRA": {"target_modules": ["c_attn"], "use_dora": True, "modules_to_save": ["lm_head"]},
    "all-linear": {"target_modules": "all-linear", "trainable_token_indices": [4, 5]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", OF_TRANSFORMERS.values(), ids=OF_TRANSFORMERS)
def test_adapters_train_on_layers_of_transformers_as_on_the_original(writer, config):
    ids = torch.arange(21).reshape(3, 7) * 5 % 61
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    config = peft.LoraConfig(r=2, fan_in_fan_out=True, **config)
    adapted = assert_same_adapters(make_writer(), writer, config, given).eval()
    if config.trainable_token_indices is None:
        before = adapted(**given).logits
        torch.testing.assert_close(adapted.merge_and_unload()(**given).logits, before)
