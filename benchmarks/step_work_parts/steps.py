# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Training steps on fake tensors: this project's, torchtitan's own, and one with TRL's loss.

Each is built as its trainer builds it and runs the trainer's own code. Only what does not compute on
the device is left out: data loading, checkpoints, weight pushes and logging.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from compiled import CompiledParts
from counting import StepCounter
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from work import Ledger, Shape

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.data.feed import Feed, TrainBatch
from torchtitan.grpo.data.rows import Sample, build_rows
from torchtitan.grpo.data.step_plan import SampleTable
from torchtitan.grpo.losses.objective import metric_reductions
from torchtitan.grpo.models.hf_config import HFModel, read_hf_model
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.training.gradient_norm import GradientClipper
from torchtitan.grpo.training.guards import Guards
from torchtitan.grpo.training.learner import Learner, Policy
from torchtitan.grpo.training.lr_schedule import build_lr_schedulers
from torchtitan.grpo.training.memory_choice import (
    ASSUMED_BYTES,
    choose_kept,
    microbatch_tokens,
)
from torchtitan.grpo.training.memory_estimate import (
    available_bytes,
    checkpoint_mode,
    estimate_memory,
)
from torchtitan.grpo.training.model_spec import build_policy_runner, hf_train_spec, parameter_shapes
from torchtitan.grpo.training.optimizers import build_optimizers
from torchtitan.grpo.training.ranks import rank_role
from torchtitan.grpo.training.scoring import Scorer
from torchtitan.grpo.types import BatchPart, PromptProgress
from torchtitan.grpo.upstream.parallelism import ParallelDims, dist_utils, parallel_dims, utils

DEVICE = torch.device("cuda")
SEQUENCE, PROMPT = 1024, 128
"""Tokens of a sequence, and of its prompt."""
PADDING = 0.02
"""Fraction of a row that is padding, as good packing leaves it."""


def write_model(folder: Path, sizes: dict[str, Any]) -> Path:
    """Writes a Hugging Face directory without weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960,
        "attention_bias": False, "eos_token_id": 7, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_batch(config: JobConfig, vocab: int, num_rows: int) -> TrainBatch:
    """Returns rows of rollouts, of which the last one of each row leaves room for padding."""
    random, row_len = np.random.default_rng(0), config.training.seq_len
    per_row = max(1, row_len // SEQUENCE)
    length, shorter = row_len // per_row, round(PADDING * row_len)
    prompt = min(PROMPT, length // 4)
    samples = []
    for index in range(num_rows * per_row):
        is_last = index % per_row == per_row - 1
        completion = length - prompt - (shorter if is_last else 0)
        ids = random.integers(8, vocab, prompt + completion).astype(np.int32)
        logprobs = np.full(completion, -1.0, np.float32)
        samples.append(Sample(ids[:prompt], ids[prompt:], logprobs, index, 1e-5))
    rows = [list(range(row * per_row, (row + 1) * per_row)) for row in range(num_rows)]
    completions = np.array([len(sample.completion_ids) for sample in samples])
    table = SampleTable(random.random(len(samples)), np.arange(len(samples)) // 8, completions)
    trained = int(completions.sum())
    return TrainBatch(
        minibatches=[build_rows(samples, rows, row_len)], minibatch_tokens=[trained],
        samples=table, num_trained_tokens=trained, num_tokens=sum(s.num_tokens for s in samples),
        mass=trained, part=BatchPart.WHOLE, publish_slot=0, progress=PromptProgress(),
    )  # fmt: skip


def shape_of(batch: TrainBatch, sizes: dict[str, Any]) -> Shape:
    rows = batch.minibatches[0]
    padded, lengths = [], []
    for ids, samples in zip(rows.sequence_ids, rows.sample_ids, strict=True):
        padded += [int(n) for n in torch.bincount(ids) if n]
        lengths += [int(n) for n in torch.unique(samples[samples >= 0], return_counts=True)[1]]
    return Shape(sizes, tuple(lengths), tuple(padded), int(rows.host_mask.sum()))


def settle_kept(config: JobConfig, hf_model: HFModel, num_rows: int) -> tuple[int, int]:
    """Chooses what is kept between microbatches as a run would on GPUs of 80 GB of its own.

    Returns:
        The bytes that a step with this many rows is estimated to need, and those that it may fill.
    """
    training = config.training
    shapes = parameter_shapes(config, hf_model)
    memory = estimate_memory(config, shapes, hf_model.model_args, dist.get_world_size())
    available = available_bytes(ASSUMED_BYTES)
    training.local_batch_size = min(training.local_batch_size, num_rows)
    if config.parallelism.fsdp_between_microbatches == "auto":
        kept = choose_kept(config, memory, available)
        config.parallelism.fsdp_between_microbatches = kept
    kept = config.parallelism.fsdp_between_microbatches
    return memory.total(checkpoint_mode(config), microbatch_tokens(config), kept), available


def make_dims(config: JobConfig) -> ParallelDims:
    dims = parallel_dims(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    return dims


def make_model(spec: Any, args: Any, dims: ParallelDims, config: Any) -> nn.Module:
    """Builds a model as upstream's Trainer does."""
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    # The meta device needs no fake tensors.
    with unset_fake_temporarily(), torch.device("meta"), utils.set_default_dtype(dtype):
        model = spec.model_cls(args)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights()
    return model.train()


class LocalFeed(Feed):
    """The feed of this process, without a group of its own: its collectives are fake anyway."""

    def __init__(self, row_len: int) -> None:
        self.row_len, self.rank, self.group = row_len, 0, dist.group.WORLD


def own_step(
    config: JobConfig,
    hf_model: HFModel,
    dims: ParallelDims,
    batch: TrainBatch,
    counter: StepCounter,
) -> Callable[[], Any]:
    """Returns this project's step: scoring, losses, gradients, clipping and the optimizer."""
    spec = hf_train_spec(hf_model, config)
    model = make_model(spec, hf_model.model_args, dims, config)
    counter.watch(model)
    trainer: Any = SimpleNamespace(
        job_config=config, parallel_dims=dims, model_parts=[model], pp_schedule=None
    )
    scorer = Scorer(
        config=config.grpo, policy=build_policy_runner(trainer), reference=None,
        feed=LocalFeed(config.training.seq_len), device=DEVICE,
        is_counted=rank_role(dims, has_output=True).is_counted,
    )  # fmt: skip
    optimizers = build_optimizers([model], config.optimizer)
    policy = Policy(
        scorer.policy, [model], optimizers,
        build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps),
        GradientClipper([model], dims, config.training.max_norm),
        metric_reductions(config.grpo, None), scorer.is_counted, scorer,
    )  # fmt: skip
    learner = Learner(
        scorer,
        [policy],
        guards=Guards(config, lambda _: None),
        enter=lambda _: None,
        before_step=lambda: None,
    )
    return lambda: learner.learn(batch, 1)


def titan_step(
    config: JobConfig,
    hf_model: HFModel,
    dims: ParallelDims,
    batch: TrainBatch,
    counter: StepCounter,
    loss: Callable[..., Any] | None = None,
) -> Callable[[], Any]:
    """Returns torchtitan's own step over the same tokens, with its cross entropy or another loss."""
    from titan_model import Trainer, titan_config, titan_model

    spec, args = titan_model(hf_model)
    titan = titan_config(config)
    model = make_model(spec, args, dims, titan)
    counter.watch(model)
    optimizers: Any = build_optimizers([model], config.optimizer)
    nothing = SimpleNamespace(step=lambda: None, maybe_wait_for_staging=lambda: None,
                              should_log=lambda _: True, log=lambda *_, **__: None)  # fmt: skip
    nothing.schedulers = [SimpleNamespace(get_last_lr=lambda: [0.0])]
    rows = batch.minibatches[0]
    size = min(config.training.local_batch_size, rows.num_rows)
    labels = torch.where(rows.host_mask, rows.labels, -100)
    trainer: Any = SimpleNamespace(
        job_config=titan, model_args=args, model_parts=[model], optimizers=optimizers,
        parallel_dims=dims, lr_schedulers=nothing, checkpointer=nothing, metrics_processor=nothing,
        tokenizer=SimpleNamespace(eos_id=hf_model.eos_token_ids[0]),
        gradient_accumulation_steps=rows.num_rows // size, device=DEVICE, step=1, ntokens_seen=0,
        train_context=dist_utils.get_train_context(False),
        maybe_enable_amp=dist_utils.maybe_enable_amp(
            dims, config.training.mixed_precision_param, DEVICE.type
        ),
        loss_fn=loss or spec.build_loss_fn(titan),
    )  # fmt: skip
    trainer.post_dataloading_process = partial(Trainer.post_dataloading_process, trainer)
    trainer.forward_backward_step = partial(Trainer.forward_backward_step, trainer)

    def step() -> None:
        parts = zip(rows.tokens.split(size), labels.split(size), strict=True)
        Trainer.train_step(trainer, iter([({"input": t}, label) for t, label in parts]))

    return step


def trl_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The arithmetic of TRL's GRPO loss on whole logits: log-probabilities, entropy, clipped loss.

    Log-probabilities are gathered logits minus a logsumexp, row by row; entropies are computed in
    chunks of 128 tokens, without gradients, for a metric.
    """
    logits = logits.float() / 0.9
    ids = labels.clamp(min=0)
    picked = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    logprobs = picked - torch.stack([row.logsumexp(-1) for row in logits])
    with torch.no_grad():
        entropies = []
        for chunk in logits.flatten(0, 1).split(128):
            logs = chunk.log_softmax(-1)
            entropies.append(-(logs.exp() * logs).sum(-1))
        entropy = torch.cat(entropies)
    mask = (labels >= 0).float()
    ratio = (logprobs - logprobs.detach()).exp()
    clipped = torch.minimum(ratio, ratio.clamp(0.8, 1.28))
    return -(clipped * mask).sum() + 0 * (entropy * mask.flatten()).sum()


STEPS = {"ours": own_step, "torchtitan": titan_step, "trl": partial(titan_step, loss=trl_loss)}


@contextmanager
def counting(shape: Shape) -> Iterator[tuple[StepCounter, CompiledParts]]:
    """Makes everything in the context run on fake tensors, with a counter that is paused at first."""
    counter = StepCounter(shape)
    compiled, clip = CompiledParts(counter), dist_utils.clip_grad_norm_

    def counted_clip(*args: Any, **kwargs: Any) -> Any:
        with counter.inside("optimizer"):
            return clip(*args, **kwargs)

    def leave(*_: Any) -> None:
        counter.stack.pop()

    hooks = (
        register_optimizer_step_pre_hook(lambda *_: counter.stack.append("optimizer")),
        register_optimizer_step_post_hook(leave),
    )
    try:
        with (
            compiled.installed(),
            mock.patch.object(dist_utils, "clip_grad_norm_", counted_clip),
            FakeTensorMode(allow_non_fake_inputs=True),
            counter,
        ):
            yield counter, compiled
    finally:
        for hook in hooks:
            hook.remove()


class Counted(NamedTuple):
    """A step that was counted.

    Attributes:
        ledger: The work.
        shape: Its sequences.
        num_kernels: Number of kernels that inductor has generated.
        needed_bytes: What the step is estimated to need of a GPU.
        available_bytes: What it may fill of a GPU of 80 GB.
    """

    ledger: Ledger
    shape: Shape
    num_kernels: int
    needed_bytes: int
    available_bytes: int


def count(step: str, arguments: list[str], sizes: dict[str, Any], num_rows: int) -> Counted:
    """Counts a step, after one that compiles and allocates.

    Args:
        step: A key of :data:`STEPS`.
        arguments: The command line of the run, which names a TOML file.
        sizes: The keys of ``config.json``.
        num_rows: Rows of one rank.
    """
    config = load_config(arguments)
    hf_model = read_hf_model(config.model.hf_assets_path)
    hf_model.model_args.update_from_config(config)
    dims = make_dims(config)  # whose groups are real
    memory = settle_kept(config, hf_model, num_rows)
    batch = make_batch(config, sizes["vocab_size"], num_rows)
    shape = shape_of(batch, sizes)
    with counting(shape) as (counter, compiled):
        run = STEPS[step](config, hf_model, dims, batch, counter)
        run()
        counter.is_paused = False
        run()
        counter.is_paused = True
    return Counted(counter.ledger, shape, compiled.num_kernels, *memory)
