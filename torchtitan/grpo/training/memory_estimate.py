# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Estimates the memory of a training step on one rank, before anything is built.

Parameters, gradients and optimizer states follow from shapes and layout. Activations are all tensors
that a layer's backward pass needs; `models/blocks/parts.py` gives their sizes for each kind of block.
For compiled blocks, which keep less, these sizes are upper bounds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.collect import module_of
from torchtitan.grpo.models.decoder import DecoderArgs
from torchtitan.grpo.models.fsdp import Kept, keeps_parameters
from torchtitan.grpo.pipeline.stages import rank_of_parameter, schedule_of, trains_together
from torchtitan.grpo.system.device import TORCH_DTYPE_MAP
from torchtitan.grpo.weight_wire.adapter_names import is_adapter

CHECKPOINTING = ("none", "selective", "full")
_FP32 = 4
_MATRIX_DIMS = 2
# Part of a device for the context, NCCL, fragments of the allocator and buffers of a push.
_RESERVED = 0.1


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that a training step holds on the rank that holds the most.

    Attributes:
        reference: The reference model, if it is on the device.
        whole_parameters: All parameters, gathered and cast; counted if kept or ``always_whole``.
        whole_gradients: All gradients before reduction; counted if kept between microbatches.
        working: Temporary buffers of FSDP and of the output layer, and attention masks.
        always_whole: Whether a forward pass leaves the parameters gathered, whatever is kept.
        adds_to_shards: Whether reduced gradients exist beside the unreduced ones that are kept.
        per_token: Bytes of activations per token, for each mode of activation checkpointing.
        recomputed: FLOPs that each of these modes recomputes, as a fraction of a step's FLOPs.
        critic: The critic's parameters and gradients, if there is one.
        critic_optimizer: The states of the critic's optimizer.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    whole_parameters: int
    whole_gradients: int
    working: int
    always_whole: bool
    adds_to_shards: bool
    per_token: Mapping[str, float]
    recomputed: Mapping[str, float]
    critic: int = 0
    critic_optimizer: int = 0

    def kept(self, kept: Kept) -> int:
        """Returns how many bytes this ``fsdp_between_microbatches`` adds to a step's peak."""
        added = 0
        if keeps_parameters(kept) and not self.always_whole:
            added += self.whole_parameters
        if kept == "keep_all":
            # Shards of gradients come into being while the whole ones are reduced.
            shards = 0 if self.adds_to_shards else self.gradients
            added += max(self.whole_gradients - shards, 0)
        return added

    def fixed(self, kept: Kept) -> int:
        states = self.parameters + self.gradients + self.optimizer + self.reference
        states += self.critic + self.critic_optimizer
        whole = self.whole_parameters if self.always_whole else 0
        return states + whole + self.working + self.kept(kept)

    def resting(self, *, offloads_optimizer: bool) -> int:
        """Returns the bytes that remain while the device is lent, without gradients or gathered parameters."""
        states = self.parameters + self.reference + self.critic // 2
        return states if offloads_optimizer else states + self.optimizer + self.critic_optimizer

    def total(self, mode: str, tokens: int, kept: Kept) -> int:
        return self.fixed(kept) + round(tokens * self.per_token[mode])

    def largest_microbatch(self, mode: str, kept: Kept, available: int) -> int:
        return max(0, int((available - self.fixed(kept)) / self.per_token[mode]))

    def choose_kept(self, mode: str, tokens: int, available: int) -> Kept:
        choices: tuple[Kept, ...] = ("keep_all", "keep_parameters")
        for kept in choices:
            if self.kept(kept) == 0 or self.total(mode, tokens, kept) <= available:
                return kept
        return "free"


def available_bytes(device_bytes: int, servers_share: float = 0.0) -> int:
    return int(device_bytes * (1 - _RESERVED - servers_share))


def checkpoint_mode(config: JobConfig) -> str:
    """Returns the key of :attr:`TrainingMemory.per_token` for the configured checkpointing."""
    mode = config.activation_checkpoint.mode
    # A budget lies between the extremes. The larger figure is the safe one.
    return "none" if mode == "memory_budget" else mode


def microbatch_tokens(config: JobConfig) -> int:
    settings, training = config.parallelism, config.training
    rows = training.local_batch_size
    if settings.pipeline_parallel_degree > 1:
        rows = settings.pipeline_parallel_microbatch_size
    return rows * training.seq_len


def estimate_memory(
    config: JobConfig, shapes: Mapping[str, tuple[int, ...]], args: DecoderArgs, num_ranks: int
) -> TrainingMemory:
    """Estimates a step's memory; ``shapes`` are by native parameter name, adapters included."""
    layout = _Layout(config, num_ranks)
    stage, critic_stage = _largest_stages(config, shapes)
    whole = sum(layout.whole(name, stage[name]) for name in stage)
    shards = sum(layout.shard(name, stage[name]) for name in stage)
    trains = {name: s for name, s in stage.items() if not config.lora.rank or is_adapter(name)}
    trained = sum(layout.shard(name, trains[name]) for name in trains)
    trained_whole = sum(layout.whole(name, trains[name]) for name in trains)
    stored = _itemsize(config.training.dtype)
    base = 2 if config.lora.rank and config.lora.base_dtype == "bfloat16" else stored
    computed = _itemsize(config.training.mixed_precision_param)
    has_reference = config.grpo.kl_coef > 0 and not config.lora.rank
    stays = has_reference and not config.grpo.ref_model_offload
    is_wrapped = layout.shards > 1 or layout.replicas > 1 or stored != computed
    groups = [_largest_group(layout, stage)] * 2  # one is prefetched
    others = has_reference + config.has_critic  # models that are gathered beside the policy
    forward_only = others * whole * computed if layout.shards > 1 else 0
    reshards = config.parallelism.fsdp_reshard_after_forward
    # A critic's values need no output layer.
    of_critic = {
        name: layout.shard(name, shape)
        for name, shape in critic_stage.items()
        if config.has_critic and module_of(name) != "output"
    }
    return TrainingMemory(
        parameters=trained * stored + (shards - trained) * base,
        gradients=trained * stored,
        optimizer=sum(
            _num_states(config, name) * layout.shard(name, trains[name]) for name in trains
        )
        * stored,
        reference=shards * stored * stays,
        whole_parameters=(whole * computed + forward_only) * is_wrapped,
        whole_gradients=trained_whole * (1 + trains_together(config)) * _FP32 * is_wrapped,
        working=sum(groups) * (2 * computed + _FP32)
        + _head_bytes(config, shapes, layout)
        + _mask_bytes(config, computed),
        always_whole=layout.shards == 1
        or reshards == "never"
        or (config.parallelism.pipeline_parallel_degree > 1 and reshards != "always"),
        adds_to_shards=config.rollout.stream,
        per_token=_per_token(config, args, stage, layout),
        recomputed=_recomputed(config, args),
        critic=2 * sum(of_critic.values()) * stored,
        critic_optimizer=sum(n * _num_states(config, name) for name, n in of_critic.items())
        * stored,
    )


class _Layout:
    def __init__(self, config: JobConfig, num_ranks: int) -> None:
        settings = config.parallelism
        self.tensor = settings.tensor_parallel_degree
        self.context = settings.context_parallel_degree
        self.replicas = settings.data_parallel_replicate_degree
        rest = self.tensor * self.replicas * settings.pipeline_parallel_degree
        self.shards = max(num_ranks // rest, 1)  # context parallelism shards parameters as well
        self._experts = settings.expert_parallel_degree

    def whole(self, name: str, shape: tuple[int, ...]) -> int:
        """Number of elements of a gathered parameter."""
        numel = math.prod(shape)
        if ".experts." in name and self._experts > 1:
            return -(-numel // self._experts)
        return -(-numel // self.tensor) if len(shape) >= _MATRIX_DIMS else numel

    def shard(self, name: str, shape: tuple[int, ...]) -> int:
        if ".experts." in name and self._experts > 1:
            ranks = self.shards * self.tensor
            return -(-math.prod(shape) // max(ranks, self._experts))
        return -(-self.whole(name, shape) // self.shards)


def _itemsize(dtype: str) -> int:
    return TORCH_DTYPE_MAP[dtype].itemsize


def _num_states(config: JobConfig, name: str) -> int:
    """Number of optimizer states of a parameter: two under Adam, one under Muon."""
    is_matrix = name.startswith("layers.") and "norm" not in name and not name.endswith(".bias")
    return 1 if config.optimizer.name == "Muon" and is_matrix else 2


def _largest_stages(
    config: JobConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the parameter shapes of policy and critic on the pipeline rank that holds the most."""
    settings = config.parallelism
    if settings.pipeline_parallel_degree == 1:
        return dict(shapes), dict(shapes)
    num_layers = len({module_of(name) for name in shapes if name.startswith("layers.")})
    rank_of = rank_of_parameter(settings, num_layers)
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(settings.pipeline_parallel_degree)]
    for name, shape in shapes.items():
        found[rank_of(name)][name] = shape
    of_critics = found[::-1] if schedule_of(settings).turns_second else found

    def size(stages: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]) -> int:
        counted = stages if config.has_critic else stages[:1]
        return sum(math.prod(shape) for stage in counted for shape in stage.values())

    return max(zip(found, of_critics, strict=True), key=size)


def _largest_group(layout: _Layout, stage: Mapping[str, tuple[int, ...]]) -> int:
    sizes: dict[str, int] = {}
    for name, shape in stage.items():
        sizes[module_of(name)] = sizes.get(module_of(name), 0) + layout.whole(name, shape)
    return max(sizes.values())


def _head_bytes(config: JobConfig, shapes: Mapping[str, tuple[int, ...]], layout: _Layout) -> int:
    """Bytes of the output layer's buffers: three slices of logits in float32."""
    vocab = max(math.prod(shape) // shape[-1] for n, shape in shapes.items() if "embed" in n)
    return 3 * _FP32 * config.grpo.logprob_chunk_tokens * vocab // layout.tensor


def _mask_bytes(config: JobConfig, itemsize: int) -> int:
    """Bytes of a dense boolean mask, and of the same mask as numbers that attention adds to its scores."""
    if config.grpo.packed_attention != "sdpa":  # `auto` takes it on GPUs only for short rows
        return 0
    return (1 + itemsize) * microbatch_tokens(config) * config.training.seq_len


def _per_token(
    config: JobConfig, args: DecoderArgs, stage: Mapping[str, tuple[int, ...]], layout: _Layout
) -> dict[str, float]:
    num_layers = len({module_of(name) for name in stage if name.startswith("layers.")})
    divides = _divides_layers(config)
    if divides:
        # A rank holds one of the two parts of other layers.
        num_layers = sum(name.endswith(".attention_norm.weight") for name in stage)
        num_layers *= 2 * config.parallelism.pipeline_parallel_degree
    elif config.parallelism.pipeline_parallel_degree > 1:
        # 1F1B holds as many microbatches on its first rank as there are ranks, and one more with a
        # critic (`tables/fused.py`).
        held = config.parallelism.pipeline_parallel_degree * config.grpo.pipeline_memory
        num_layers *= held + trains_together(config)
    computed = _itemsize(config.training.mixed_precision_param)
    layers, kinds = args.layers, args.layers.kinds
    # Beside the layers: the embedding, the last norm, and scored hidden states with their gradient, and
    # the rotary embedding; and in one layer at a time, what is recomputed, and the gradients of its
    # feed-forward.
    widest = max(kind.feed_forward.width for kind in kinds)
    around = 5 * args.dim + 3 * widest + 2 * args.dim + 2 * layers[0].attention.rotary_dim
    parts = layout.tensor * layout.context
    found = {}
    for mode in CHECKPOINTING:
        option = config.activation_checkpoint.selective_ac_option if mode == "selective" else mode
        block = max(kind.kept_channels("none") for kind in kinds) if mode != "none" else 0
        kept = fmean(layer.kept_channels(option) for layer in layers)
        if divides and mode == "full":  # by attention, and its output twice
            kept += 2 * layers[0].attention.attended + layers[0].attention.sent
        channels = num_layers * kept + block + around
        found[mode] = channels * computed / parts
    return found


def _divides_layers(config: JobConfig) -> bool:
    settings = config.parallelism
    return settings.pipeline_parallel_degree > 1 and schedule_of(settings).divides_layers


def _recomputed(config: JobConfig, args: DecoderArgs) -> dict[str, float]:
    """Fraction of a step's FLOPs that each mode recomputes, if each row holds one sequence."""
    # A causal query meets half of the keys.
    pairs = sum(layer.attention.pair_products for layer in args.layers)
    attention = pairs * config.training.seq_len / 2
    step = sum(layer.products for layer in args.layers) + attention + args.dim * args.vocab_size
    option = config.activation_checkpoint.selective_ac_option
    attention_again = {
        "selective": attention / max(int(option), 1) if option.isdigit() else 0,
        "full": 0 if _divides_layers(config) else attention,
    }
    again = {
        mode: sum(
            layer.recomputed(option if mode == "selective" else mode) for layer in args.layers
        )
        + attention_again.get(mode, 0)
        for mode in CHECKPOINTING
    }
    return {mode: number / (3 * step) for mode, number in again.items()}
