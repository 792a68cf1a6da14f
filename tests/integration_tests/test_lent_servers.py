# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whole runs whose servers sleep while the ranks train, and wake for each batch."""

import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from server_kinds import REAL, python_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtitan.grpo.data.record import RecordReader
from torchtitan.grpo.types import Rollout

MODEL = "assets/reverse_digits/model"
VOCAB_SIZE = 128
# Of logprobs; kernels differ by less than 1e-4. Most steps change some by more than ten times as much.
TOLERANCE = 3e-4
SERVERS = {
    "embedded": "grpo.inference.embedded",
    "vllm": "vllm.entrypoints.openai.api_server",
    "sglang": "sglang/server_main.py",
}
NUM_WAKES = 100
KINDS = ["embedded", *(pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in REAL)]


@pytest.mark.slow
@pytest.mark.long  # test_real_servers.py has one sleep of each kind, and test_lending.py a run
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_sleeps_between_batches_loses_and_mixes_nothing(
    make_run, repository, tmp_path, kind
):
    python = sys.executable if kind == "embedded" else python_of(kind)
    model = _with_a_token_for_each_id(repository / MODEL, tmp_path / "model")
    # Now and then a batch is full before its step, and needs no wake.
    num_steps = NUM_WAKES + NUM_WAKES // 10 + 1
    run = make_run(
        f"--inference.kind={kind}", f"--inference.python={python}", "--inference.lend",
        f"--training.steps={num_steps}", "--grpo.hf_export_interval=1",
        f"--model.hf_assets_path={model}",
        # At the end of a batch, the server is busy with the next one.
        "--grpo.prompts_per_step=8", "--grpo.group_size=4", "--rollout.max_concurrent_rollouts=8",
        "--weight_sync.attest_every=1", "--lr_scheduler.warmup_steps=0",
        f"--rollout.record={tmp_path / 'run/rollouts.jsonl'}", "--evaluation.num_prompts=8",
    )  # fmt: skip
    run.start()
    before, after = (_memory_at(run, kind, step) for step in (20, 100))
    assert run.finish() == 0, run.console[-6000:]
    run.check_metrics()
    totals = {key: sum(record[key] for record in run.metrics) for key in run.metrics[-1]}
    assert totals["lend/wakes"] >= NUM_WAKES
    assert totals["lend/kills"] == totals["rollout/failed_requests"] == 0
    assert totals["lend/cut_requests"] >= NUM_WAKES
    last = run.metrics[-1]
    assert last["weight_sync/failures"] == 0
    assert last["weight_sync/attested"] == last["weight_sync/pushes"] > NUM_WAKES
    assert run.fates() == {}
    _assert_each_token_is_of_its_version(run, model)
    keeps = "keeps its weights and its KV cache in memory while it sleeps" in run.console
    assert keeps == (kind != "embedded")  # on a CPU
    # A half of what would be lost if each wake kept one more copy of the weights.
    assert after - before < 40 * (model / "model.safetensors").stat().st_size


def _with_a_token_for_each_id(source: Path, folder: Path) -> Path:
    """vLLM's and SGLang's logprobs are those of the whole vocabulary only if no id is excluded."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<unused {i}>" for i in range(len(tokenizer), VOCAB_SIZE)])
    tokenizer.save_pretrained(folder)
    return folder


def _memory_at(run, kind: str, step: int) -> float:
    """Median of the bytes that the server's processes have for themselves, in the next second."""
    run.wait_for_step(step)
    (server,) = (p for p in run.processes(SERVERS[kind]) if _is_server(p, SERVERS[kind]))
    found = []
    for _ in range(20):
        found.append(
            sum(p.memory_full_info().uss for p in (server, *server.children(recursive=True)))
        )
        time.sleep(0.05)
    return statistics.median(found)


def _is_server(process: psutil.Process, word: str) -> bool:
    parent = process.parent()
    return parent is None or word not in " ".join(parent.cmdline())


def _assert_each_token_is_of_its_version(run, start: Path) -> None:
    """Recomputes what the record says, with the exported weights of each version."""
    record = RecordReader(str(run.folder / "rollouts.jsonl"), VOCAB_SIZE, 1.0, "rollout.record")
    by_version: dict[int, list[tuple[Rollout, slice]]] = {}
    num_mixed = 0
    for _, batch in record:
        for rollout in (r for group in batch.groups for r in group.rollouts):
            assert rollout.segments[-1].end == len(rollout.token_ids)
            num_mixed += len({s.version for s in rollout.segments}) > 1
            for s in rollout.segments:
                assert batch.version - 1 <= s.version <= batch.version
                by_version.setdefault(s.version, []).append((rollout, slice(s.start, s.end)))
    assert num_mixed > 0, "no completion was cut"
    apart = []
    for version, parts in by_version.items():
        own, next_one = (_logprobs(run.folder, start, v, parts) for v in (version, version + 1))
        recorded = np.concatenate([rollout.logprobs[part] for rollout, part in parts])
        np.testing.assert_allclose(own, recorded, atol=TOLERANCE, err_msg=f"version {version}")
        apart.append(np.abs(next_one - own).max())
    assert np.median(apart) > 10 * TOLERANCE, "versions hardly differ, so this shows nothing"


def _logprobs(
    folder: Path, start: Path, version: int, parts: list[tuple[Rollout, slice]]
) -> np.ndarray:
    """Of the tokens of ``parts``, one after the other, by transformers."""
    path = folder / f"hf/step-{version}" if version > 0 else start
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = [torch.tensor([*r.prompt_ids, *r.token_ids]) for r, _ in parts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits, -1)
    found = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[:, :, 0].numpy()
    offsets = [len(rollout.prompt_ids) - 1 for rollout, _ in parts]
    return np.concatenate([
        row[offset + part.start : offset + part.stop]
        for row, offset, (_, part) in zip(found, offsets, parts, strict=True)
    ])  # fmt: skip
