# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Measures training steps and the boundary between them: the real model, with random weights.

At the boundary, the training thread calls ``Snapshots.copy_into`` when it publishes and
``Snapshots.fence`` before the next optimizer step.
"""

import gc
import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from check_gpu.parts import device_of, make_pushed, median_ms, product_tflops
from check_gpu.row import Row, Settings, judged
from torchtitan.grpo.config.frame import Comm
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.cost import flops_cost
from torchtitan.grpo.data.rows import Sample, TrainRows, build_rows
from torchtitan.grpo.models.fsdp import Kept
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.system import strict_json
from torchtitan.grpo.training.frame import join_ranks
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.model_spec import hf_train_spec, whole_model_runner
from torchtitan.grpo.training.optimizers import build_optimizers
from torchtitan.grpo.training.scoring import MinibatchLoss
from torchtitan.grpo.training.trainee import ScoredRows
from torchtitan.grpo.upstream.parallelism import parallel_dims, utils

_QWEN3 = {
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936,
}  # fmt: skip
_SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072} | _QWEN3,
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144} | _QWEN3,
}
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 997,
}  # fmt: skip


class _Variant(NamedTuple):
    """How a step is computed.

    Attributes:
        compiled: ``compile.enable``.
        checkpointing: ``activation_checkpoint.mode``.
        num_microbatches: Number of microbatches, among which the rows are divided.
        kept: ``parallelism.fsdp_between_microbatches``.
    """

    compiled: bool
    checkpointing: str
    num_microbatches: int = 1
    kept: Kept = "keep_all"

    @property
    def case(self) -> str:
        case = f"{'compiled' if self.compiled else 'eager'}, checkpointing {self.checkpointing}"
        parts = f", {self.num_microbatches} microbatches, {self.kept}"
        return case + (parts if self.num_microbatches > 1 else "")


_EAGER = _Variant(False, "none")
_FULL = _Variant(False, "full")
# In the order of their value. On one GPU nothing is gathered, but cast, copied and added up.
_VARIANTS = {
    "train-0.6b": (
        _Variant(True, "none"), _EAGER, _Variant(True, "none", 4),
        _Variant(True, "none", 4, "free"), _Variant(True, "full"), _FULL,
    ),
    "train-1.7b": (_Variant(True, "none"), _EAGER, _Variant(True, "full"), _FULL),
}  # fmt: skip
_PER_ROW, _STEPS, _TOP = 4, 6, 15
# Parts of kernels' names, for what moves bytes and computes nothing.
_COPIES = ("copy", "memcpy", "memset", "chunk_cat", "fill")


def run(settings: Settings) -> Iterator[Row]:
    """Yields two rows for each variant of steps, or with the check ``boundary`` one for each size."""
    device = device_of(settings)
    _join_alone(device)
    if settings.check == "boundary":
        for name in _SIZES if settings.on_gpu else ("0.6b",):
            yield _boundary(Trained(settings, name, _FULL), name)
            _forget(settings)
        return
    peak = product_tflops(device, 8192 if settings.on_gpu else 256)
    for variant in _VARIANTS[settings.check] if settings.on_gpu else (_EAGER,):
        try:
            trained = Trained(settings, settings.check[-4:], variant)
            yield _steps(trained, variant.case, peak)
            yield _kernels(trained, variant.case)
        except torch.OutOfMemoryError:
            yield Row(variant.case, "skipped", reason="It needs more GPU memory.")
        trained = None  # frees the model before the next one is made
        _forget(settings)


def _forget(settings: Settings) -> None:
    gc.collect()
    torch._dynamo.reset()
    if settings.on_gpu:
        torch.cuda.empty_cache()


def _join_alone(device: torch.device) -> None:
    """Makes the default process group of one rank, with the backends of a run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if device.type == "cuda":
        torch.cuda.set_device(0)
    join_ranks(Comm(trace_buf_size=0), "")


class Trained:
    """Model, optimizer, clipping, loss and rows, built and called as a run does.

    Args:
        settings: Settings of the check.
        size: Name of the model's size.
        variant: How a step is computed.
    """

    def __init__(self, settings: Settings, size: str, variant: _Variant) -> None:
        self.device = device_of(settings)
        self.shape = shape = _SIZES[size] if settings.on_gpu else _SMALL
        num_rows, seq = (4, 2048) if settings.on_gpu else (2, 64)
        config = JobConfig()
        config.model.hf_assets_path = _write_model(settings.folder, shape)
        config.training.seq_len = seq
        config.training.local_batch_size = num_rows // variant.num_microbatches
        config.parallelism.fsdp_between_microbatches = variant.kept
        config.training.mixed_precision_param = "bfloat16"
        config.activation_checkpoint.mode = variant.checkpointing  # pyright: ignore
        config.compile.enable = variant.compiled
        self.config = config
        hf_model = read_hf_model(config.model.hf_assets_path)
        hf_model.model_args.update_from_config(config)
        dims = parallel_dims(config.parallelism, 1)
        dims.build_mesh()
        spec: Any = hf_train_spec(hf_model, config)
        with torch.device("meta"):
            model = spec.model_cls(hf_model.model_args)
        torch.manual_seed(0)
        self.model = spec.parallelize_fn(model, dims, config).to_empty(device=self.device)
        with torch.no_grad():
            self.model.init_weights()
        self.optimizers = build_optimizers([self.model], config.optimizer)
        self.clipper = GradientClipper([self.model], dims, config.training.max_norm)
        self.runner = whole_model_runner(self.model, config)
        self.rows = _make_rows(shape["vocab_size"], num_rows, seq).to(self.device)
        self.marks = Marks(self.device)
        self.model.output.register_forward_pre_hook(self._head_begins)
        self.model.output.register_forward_hook(lambda *_: self.marks.add("head"))

    def _head_begins(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.marks.add("body")
        # Called when the gradient of the head's input is there, where its backward pass has ended.
        inputs[0].register_hook(lambda _: self.marks.add("head"))

    def step(self, fence: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Runs an optimizer step, after a fence; returns the gradient's norm."""
        self.marks.begin()
        self.optimizers.zero_grad()
        loss = MinibatchLoss(ScoredRows(self.rows, None, None), self.config.grpo)
        self.runner.forward_backward(self.rows, loss)
        self.marks.add("body")
        norm = self.clipper.clip()
        fence()
        self.optimizers.step()
        self.marks.add("optimizer")
        return norm

    def flops(self) -> float:
        """Returns the FLOPs of a step, without recomputation, padding, and tokens not scored."""
        tokens, scored = self.rows.tokens.numel(), int(self.rows.host_mask.sum())
        sequences = len(self.rows.tokens) * _PER_ROW
        head = 6.0 * self.shape["hidden_size"] * self.shape["vocab_size"]
        return sequences * flops_cost(self.shape)(tokens // sequences) - head * (tokens - scored)


class Marks:
    """Milliseconds of the parts of a step, each part ended by a mark on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Begins a step."""
        self._marks.clear()
        self.add("")

    def add(self, part: str) -> None:
        """Says which part of the step ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def parts(self) -> dict[str, float]:
        """Returns the milliseconds of each part, once the device has done the step."""
        found: dict[str, float] = {}
        for (_, begin), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            ms = begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3
            found[f"{part}_ms"] = found.get(f"{part}_ms", 0.0) + ms
        return found


def _write_model(folder: Path, shape: dict[str, int]) -> str:
    """Writes a Hugging Face directory without weights; returns its path."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960,
        "attention_bias": False, "eos_token_id": 0, "tie_word_embeddings": True, **shape,
    }  # fmt: skip
    (folder / "config.json").write_text(strict_json.dumps(config))
    return str(folder)


def _make_rows(vocab: int, num_rows: int, seq: int) -> TrainRows:
    """Returns full rows of rollouts of equal length, a quarter prompt and the rest completion."""
    random, length = np.random.default_rng(0), seq // _PER_ROW
    prompt, completion = length // 4, length - length // 4
    count = num_rows * _PER_ROW
    samples = [
        Sample(
            random.integers(1, vocab, prompt).astype(np.int32),
            random.integers(1, vocab, completion).astype(np.int32),
            np.full(completion, -np.log(vocab), np.float32),
            sample_id=number, loss_weight=1.0 / (count * completion),
        )
        for number in range(count)
    ]  # fmt: skip
    members = [list(range(i * _PER_ROW, (i + 1) * _PER_ROW)) for i in range(num_rows)]
    return build_rows(samples, members, seq).with_advantages(random.standard_normal(count))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _steps(trained: Trained, case: str, peak_tflops: float) -> Row:
    device, on_gpu = trained.device, trained.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    trained.step().item()
    first = time.perf_counter() - begin
    trained.step().item()
    steps, hosts, parts = [], [], []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        norm = trained.step()
        hosts.append(time.perf_counter() - begin)
        norm = float(norm)  # a run, too, waits once a step
        _synchronize(device)
        steps.append(time.perf_counter() - begin)
        parts.append(trained.marks.parts())
    seconds, tokens = statistics.median(steps), trained.rows.tokens.numel()
    rate = trained.flops() / seconds
    figures = {
        "tokens_per_second": tokens / seconds, "step_ms": seconds * 1e3,
        "host_ms": statistics.median(hosts) * 1e3,
        **{name: statistics.median(part[name] for part in parts) for name in parts[0]},
        "part_of_measured_product": rate / (peak_tflops * 1e12), "first_step_seconds": first,
        "gradient_norm": norm,
    }  # fmt: skip
    if on_gpu:
        figures["mfu"] = rate / utils.get_peak_flops(torch.cuda.get_device_name())
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    facts = {"attention": trained.model.settings.attention}
    return judged(case, math.isfinite(norm), "the gradient is finite", figures, facts=facts)


def _kernels(trained: Trained, case: str) -> Row:
    """Counts the kernels of a step; the longest ones are in the check's output."""
    on_gpu = trained.device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        trained.step()
        _synchronize(trained.device)
    times = {
        event.key: ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count)
        for event in profiler.key_averages()
        if not event.is_user_annotation  # a range would count its kernels twice
    }  # fmt: skip
    times = {key: found for key, found in times.items() if found[0] > 0}
    print(f"\n{case}, ms and calls of a step:")
    for key, (ms, count) in sorted(times.items(), key=lambda item: -item[1][0])[:_TOP]:
        print(f"{ms:10.3f} {count:6}  {key[:120]}", flush=True)
    copies = sum(
        ms for key, (ms, _) in times.items() if any(word in key.lower() for word in _COPIES)
    )
    figures = {
        "kernels": float(sum(count for _, count in times.values())),
        "busy_ms": sum(ms for ms, _ in times.values()), "copies_ms": copies,
        "nccl_ms": sum(ms for key, (ms, _) in times.items() if "nccl" in key),
    }  # fmt: skip
    return Row(f"{case}: kernels", "measured", figures)


def _boundary(trained: Trained, name: str) -> Row:
    """Compares steps that publish with steps that do not."""
    device, on_gpu = trained.device, trained.device.type == "cuda"
    quiet = median_ms(trained.step, device)
    _synchronize(device)
    before = torch.cuda.max_memory_allocated() if on_gpu else 0
    pushed = make_pushed(dict(trained.model.named_parameters()), device, num_slots=2)
    snapshots, hosts, fences, slots = pushed.snapshots, [], [], itertools.cycle(range(2))

    def fence() -> None:
        begin = time.perf_counter()
        snapshots.fence()
        fences.append((time.perf_counter() - begin) * 1e3)

    def publishing_step() -> None:
        trained.step(fence)
        begin = time.perf_counter()
        snapshots.copy_into(next(slots))
        hosts.append((time.perf_counter() - begin) * 1e3)

    figures = {
        "quiet_step_ms": quiet, "step_ms": median_ms(publishing_step, device),
        "publish_host_ms": statistics.median(hosts), "fence_host_ms": statistics.median(fences),
        "fence_stream_ms": snapshots.stalled_seconds * 1e3, "tensors": float(len(pushed.slots.shards[0])),
        "slot_gib": pushed.plan.num_bytes / 2**30,
    }  # fmt: skip

    def copy_alone() -> None:
        snapshots.copy_into(0)
        snapshots.fence()

    figures["copy_alone_ms"] = median_ms(copy_alone, device)
    if on_gpu:
        figures["higher_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    snapshots.read(0)
    snapshots.close()
    _kept.append(pushed)
    return Row(f"{name}, float32 to bfloat16", "measured", figures)


_kept = []
"""Pinned memory, which must not be freed, because its addresses must not be used again."""
