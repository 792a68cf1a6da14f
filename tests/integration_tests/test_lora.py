"""Whole runs with low-rank adapters: what they train, push, save and export."""

import json
import shutil
import subprocess
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

SMALL = ("--grpo.prompts_per_step=4", "--evaluation.num_prompts=16", "--training.steps=4")
LORA = ("--lora.rank=8", "--optimizer.lr=5e-3", "--lr_scheduler.warmup_steps=0")


@pytest.mark.parametrize("push", ["adapters", pytest.param("merged", marks=pytest.mark.long)])
def test_a_run_serves_what_its_adapters_say_and_exports_them(make_run, repository, push):
    run = make_run(
        *SMALL, *LORA, f"--lora.push={push}", "--rollout.max_head_offpolicyness=0",
        "--grpo.kl_coef=0.1", "--weight_sync.attest_every=1", "--weight_sync.checksum",
        "--observe.log_level=info",
    ).succeed()  # fmt: skip
    summary = run.summary
    assert summary["server_version"] == 4
    assert all(record["mismatch/kl"] < 1e-6 for record in run.metrics)
    divergence = [record["loss/reference_kl"] for record in run.metrics]
    assert abs(divergence[0]) < 1e-9 and all(d > 1e-5 for d in divergence[1:])
    # The base with PEFT's adapters computes what the export computes.
    base = repository / "assets/reverse_digits/model"
    exported = AutoModelForCausalLM.from_pretrained(summary["hf_checkpoint"]).eval()
    adapters = Path(summary["hf_checkpoint"]).parents[1] / "peft/step-4"
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters)
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        found, merged = adapted.eval()(tokens).logits, exported(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base).eval()(tokens).logits
    torch.testing.assert_close(found, merged, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 1e-2
    assert ("a version of the adapters has" in run.console) == (push == "adapters")


def test_a_checkpoint_holds_adapters_alone_and_a_resumed_run_goes_on_with_them(make_run):
    checkpoint = ("--checkpoint.enable", "--checkpoint.interval=2", "--lora.push=merged")
    first = make_run(*SMALL, *LORA, *checkpoint, "--rollout.max_head_offpolicyness=0").succeed()
    held = FileSystemReader(first.folder / "checkpoint/step-4").read_metadata()
    weights = {key for key in held.state_dict_metadata if key.startswith("layers.")}
    assert weights and all(".lora_" in key for key in weights)
    moments = {key for key in held.state_dict_metadata if key.startswith("optimizer.state.")}
    assert moments and all(".lora_" in key for key in moments)
    before = load_file(first.folder / "peft/step-4/adapter_model.safetensors")
    second = make_run(
        *SMALL, *LORA, *checkpoint, "--training.steps=5", "--optimizer.lr=0",
        "--rollout.max_head_offpolicyness=0",
    ).succeed()  # fmt: skip
    after = load_file(second.folder / "peft/step-5/adapter_model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert second.metrics[-1]["mismatch/kl"] < 1e-6
    refused = make_run(*SMALL, *LORA, *checkpoint, "--lora.rank=4", "--training.steps=6")
    assert "lora.rank must stay 8" in refused.fail()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "push"),
    [
        pytest.param("vllm", "adapters", marks=pytest.mark.vllm),
        pytest.param("vllm", "merged", marks=[pytest.mark.vllm, pytest.mark.long]),
        pytest.param("sglang", "adapters", marks=[pytest.mark.sglang, pytest.mark.long]),
        pytest.param("sglang", "merged", marks=[pytest.mark.sglang, pytest.mark.long]),
    ],
)
def test_a_real_server_serves_the_adapters(
    server: str, push: str, repository: Path, tmp_path: Path
):
    """Versions arrive while requests are in flight; the last is compared with transformers."""
    model = tmp_path / f"lora-{push}"  # the script's folder is named after it
    shutil.copytree(repository / "assets/reverse_digits/model", model)
    result = subprocess.run(
        [
            *("bash", str(repository / "scripts/verify_grpo_cpu.sh")),
            *("--server", server, "--model", str(model), "--optimizer.lr", "1e-2"),
            *("--training.steps", "6", "--lora.rank", "8", "--lora.push", push),
            *("--weight_sync.attest_every", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("\nok ") == 6
    assert f"verified: {server} serves the trainer's weights" in result.stdout
    metrics = repository / f"outputs/verify-cpu-{server}-{model.name}/metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["weight_sync/attested"] == last["weight_sync/pushes"] > 0
    print(f"{server}: a push of {push} has {last['weight_sync/push_bytes']:.0f} bytes")
    whole = sum(t.nbytes for t in load_file(model / "model.safetensors").values())
    assert (last["weight_sync/push_bytes"] < whole / 4) == (push == "adapters")
