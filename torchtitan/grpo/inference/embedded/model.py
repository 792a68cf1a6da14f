# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Loads a transformers model, and runs its prefill and decode steps on the slots of the KV cache."""

import json
import logging
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from torchtitan.grpo.inference.answers import first_architecture
from torchtitan.grpo.inference.client import PromptRating
from torchtitan.grpo.inference.embedded.attention import ATTENTION, additive_mask, fused_kernels
from torchtitan.grpo.inference.embedded.decode_graph import Capture, DecodeGraphs
from torchtitan.grpo.inference.embedded.kv_cache import SlotCache
from torchtitan.grpo.inference.embedded.prefill import PrefillPlan
from torchtitan.grpo.inference.embedded.step_layout import (
    ChunkPart,
    RowRange,
    StepLayout,
    WholePart,
    split_rows,
    upload,
)
from torchtitan.grpo.system.files import check_folder
from torchtitan.grpo.types import TopTokens
from torchtitan.grpo.weight_wire.model_files import WeightFiles
from torchtitan.grpo.weight_wire.model_folder import (
    ModelError,
    attention_window,
    read_json,
    refuse_quantised,
    require_undamaged,
)

logger = logging.getLogger(__name__)

_SETTING = "--model-path"
# Families whose windows are left out, because no sequence is longer.
_WINDOWED = ("mistral", "qwen2", "qwen3", "qwen3_moe")
# Bytes of keys and values that attention reads in the time that one more call of it takes.
_CALL_BYTES = {"cpu": 128 * 1024, "cuda": 16 * 1024 * 1024}
# What a layer of Qwen3 costs without a graph, about 60 kernels from Python at 10 us, as a number of calls
# of attention at 5 us. A graph may read as much in vain.
_LAYER_CALLS = 120
# Number of positions whose logits over the vocabulary are in memory at once.
_LOGIT_ROWS = 256


class ModelRunner:
    """A causal language model and the KV cache of its running requests.

    Once the engine has started, only the engine's thread uses the runner. ``max_length`` bounds prompt and
    completion together. Only ``known_ids`` are sampled; None allows all ids.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_slots: int,
        max_length: int,
        known_ids: Collection[int] | None = None,
        capture: Capture | None = None,
    ) -> None:
        _check_attention(model)
        model.config._attn_implementation = ATTENTION
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size: int = model.config.vocab_size
        self.excluded = None
        if unknown := set(range(self.vocab_size)) - set(known_ids or range(self.vocab_size)):
            self.excluded = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            self.excluded[sorted(unknown)] = True
        self.max_slots = max_slots
        self.max_length = max_length
        self.cache = SlotCache(max_slots, max_length)
        self._call_positions = _call_positions(model)
        self._graphs = None
        if capture is not None:
            in_vain = _LAYER_CALLS * self._call_positions
            self._graphs = DecodeGraphs(
                self._hidden, self.cache, in_vain, capture, self.device, self.dtype
            )

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, lengths: list[int], plan: PrefillPlan
    ) -> torch.Tensor:
        """Computes one token of each row and the prompts of ``plan``. Returns [rows, vocab] logits.

        ``ids`` and ``positions`` [rows] belong to each row's newest token. For a prompt, that is the last
        token planned for this step. ``lengths`` are the positions plus 1.
        """
        hidden, (whole, chunk) = None, self._prompt_parts(plan)
        if self._graphs is not None and whole is None and chunk is None:
            hidden = self._graphs.run(ids, positions, lengths)
        if hidden is None:
            ranges = self._masked(split_rows(lengths, self._call_positions), lengths, positions)
            hidden = self._hidden(ids, StepLayout(positions, ranges, whole, chunk))
        return self.model.lm_head(hidden[: len(lengths)])

    def release(self) -> None:
        """Frees the KV cache and the CUDA graphs. No request may be running."""
        self.cache.release()
        if self._graphs is not None:
            self._graphs.release()

    def _hidden(self, ids: torch.Tensor, step: StepLayout) -> torch.Tensor:
        """Returns the hidden states [num_tokens, dim] of all tokens of a step."""
        self.cache.plan(step)
        with fused_kernels(self.device):
            return self.model.model(
                input_ids=step.flat_ids(ids),
                position_ids=step.flat_positions(),
                past_key_values=self.cache,
                use_cache=True,
                slot_cache=self.cache,
            ).last_hidden_state[0]

    def _masked(
        self, ranges: list[RowRange], lengths: list[int], positions: torch.Tensor
    ) -> list[RowRange]:
        masked = []
        for rows in ranges:
            if min(lengths[rows.start : rows.stop]) < rows.length:
                read = torch.arange(rows.length, device=self.device)
                hidden_from = read > positions[rows.start : rows.stop].unsqueeze(1)
                rows = replace(rows, mask=additive_mask(hidden_from, self.dtype)[:, None, None, :])
            masked.append(rows)
        return masked

    def _prompt_parts(self, plan: PrefillPlan) -> tuple[WholePart | None, ChunkPart | None]:
        """Uploads a step's prompt tokens in one copy. Returns (whole prompts, chunk), None for one that is empty."""
        # A prompt, or a chunk, of one token is only its row's token.
        prefills = [prefill for prefill in plan.whole if len(prefill.tokens) > 1]
        chunk = plan.chunk
        if chunk is not None and chunk.stop - chunk.start < 2:
            chunk = None
        if not prefills and chunk is None:
            return None, None
        longest = max((len(prefill.tokens) for prefill in prefills), default=1)
        padded = [p.tokens[:-1] + [0] * (longest - len(p.tokens)) for p in prefills]
        chunk_rows = [] if chunk is None else chunk.rows
        ids, slots, sources, chunk_ids, chunk_slots = upload(
            [
                [token for tokens in padded for token in tokens],
                [row for prefill in prefills for row in prefill.rows],
                [i for i, prefill in enumerate(prefills) for _ in prefill.requests],
                [] if chunk is None else chunk.tokens[chunk.start : chunk.stop - 1],
                chunk_rows,
            ],
            self.device,
        )
        whole = WholePart(ids.view(len(padded), -1), slots, sources) if padded else None
        if chunk is None:
            return whole, None
        mask = None
        if chunk.start:
            own = torch.arange(chunk.start, chunk.stop - 1, device=self.device).unsqueeze(1)
            read = torch.arange(chunk.stop - 1, device=self.device)
            mask = additive_mask(read > own, self.dtype)
        return whole, ChunkPart(chunk_ids, chunk_slots, chunk_rows[0], chunk.start, mask)

    def rate(self, sequences: list[list[int]], num_top: int = 0) -> list[PromptRating]:
        """Returns the logprobs of each sequence's tokens after its first.

        Also returns the ``num_top`` most likely tokens at each position, the most likely one first. Runs
        one forward pass without the KV cache.
        """
        longest = max(map(len, sequences))
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in sequences]
        ids = torch.tensor(padded, device=self.device)
        with fused_kernels(self.device):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        counts = [len(tokens) - 1 for tokens in sequences]
        is_real = (torch.arange(longest - 1) < torch.tensor(counts).unsqueeze(1)).to(self.device)
        rated = [
            self._rate_positions(part, targets, num_top)
            for part, targets in zip(
                hidden[is_real].split(_LOGIT_ROWS),
                ids[:, 1:][is_real].split(_LOGIT_ROWS),
                strict=True,
            )
        ]
        logprobs, top_logprobs, top_ids = (
            torch.cat(part).numpy(force=True) for part in zip(*rated, strict=True)
        )
        return [
            PromptRating(
                logprobs[begin:end].tolist(),
                TopTokens(top_ids[begin:end], top_logprobs[begin:end]) if num_top else None,
            )
            for begin, end in pairwise(accumulate(counts, initial=0))
        ]

    def _rate_positions(
        self, hidden: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the targets' logprobs, and logprobs and ids of the most likely tokens."""
        logprobs = torch.log_softmax(self.model.lm_head(hidden).float(), dim=-1)
        values, indices = logprobs.topk(num_top, dim=-1)
        return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), values, indices.int()


def _call_positions(model: PreTrainedModel) -> int:
    """Returns how many cached positions can be read in the time that one more attention call costs."""
    config = model.config
    position_bytes = 2 * config.num_key_value_heads * _head_dim(config) * model.dtype.itemsize
    return _CALL_BYTES.get(model.device.type, _CALL_BYTES["cuda"]) // position_bytes


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_attention(model: PreTrainedModel) -> None:
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(
            f"The embedded server needs full attention in every layer; {config.model_type} has "
            f"{sorted(layer_types)}. Serve this model with vLLM or SGLang."
        )
    if model.device.type == "cuda" and _head_dim(config) * model.dtype.itemsize % 16:
        raise ValueError(
            "On a GPU, the embedded server needs attention heads of a multiple of 16 bytes, which "
            f"torch's fused kernels take, got {_head_dim(config)} numbers in {model.dtype}. Serve "
            "this model with vLLM or SGLang."
        )
    # Logits are lm_head(hidden), so anything that a model does to them afterwards would be lost.
    altered = [
        name
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if getattr(config, name, None) is not None
    ]
    if altered or not hasattr(model, "lm_head") or not hasattr(model, "model"):
        raise ValueError(
            "The embedded server needs a model with the attributes `model` and `lm_head` and with "
            f"unchanged logits, as in Qwen3 and Llama; {type(model).__name__} differs {altered}. "
            "Serve this model with vLLM or SGLang."
        )


def read_config(path: str) -> tuple[PreTrainedConfig, int | None]:
    """Returns the configuration, changed to full attention, and the length of the original window, if any."""
    file = Path(path) / "config.json"
    content, window = read_json(file, _SETTING), None
    refuse_quantised(content, file, _SETTING)
    content.pop("quantization_config", None)  # an empty one, which transformers cannot read
    if "model_type" not in content:
        raise ModelError(
            f"{_SETTING} must have the key model_type in its config.json, and lacks it."
        )
    if content["model_type"] in _WINDOWED:
        window = attention_window(content, first_architecture(content) or "")
        content.pop("layer_types", None)
        content |= {"use_sliding_window": False, "sliding_window": None}
    return AutoConfig.for_model(**content), window


def load_model(path: str, device: str, dtype: str) -> PreTrainedModel:
    """Loads the model of a Hugging Face directory, without downloading anything.

    Attention is full in each layer. For a model with sliding windows, ``max_position_embeddings`` is limited
    to the window's length, up to which full attention gives the same. The device ``auto`` is CUDA if there is
    a GPU; the dtype ``auto`` is float32 on CPU and bfloat16 on CUDA. Raises ValueError if the weights are
    quantized or do not match the model, or if the directory is an export whose files were changed later.
    """
    check_folder(path)
    for weights in (False, True):
        require_undamaged(Path(path), _SETTING, weights=weights)
    (config, window), files = read_config(path), WeightFiles(Path(path), _SETTING)
    for note in files.check(files.own_shapes(), is_tied=config.tie_word_embeddings):
        logger.warning(note)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    made_of: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if made_of is None:
        raise ValueError(
            f"{_SETTING} must be a causal language model, got {config.model_type} in {path}."
        )
    # Given as tensors, the weights are those of the files that count for the trainer.
    model, info = made_of.from_pretrained(
        None,
        config=config,
        state_dict=files.slices(),
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    for name in sorted(info["missing_keys"]):
        files.refuse_missing(name)
    if window is not None:
        model.config.max_position_embeddings = min(window, model.config.max_position_embeddings)
    # pyright does not understand how transformers decorates `to`.
    return model.to(device=torch.device(device))  # pyright: ignore[reportCallIssue]


def read_known_ids(path: str) -> set[int] | None:
    """Returns the token ids that may be sampled: those in tokenizer.json and those of :func:`read_eos_ids`."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        logger.info("There is no tokenizer.json in %s, so all of the vocabulary is sampled.", path)
        return None
    return {*Tokenizer.from_file(str(file)).get_vocab().values(), *read_eos_ids(path)}


def read_eos_ids(path: str) -> frozenset[int]:
    """Returns the EOS ids in config.json and generation_config.json, ignoring entries that are no ids."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(path) / name
        if file.is_file():
            eos = json.loads(file.read_bytes()).get("eos_token_id")
            found.update(t for t in (eos if isinstance(eos, list) else [eos]) if type(t) is int)
    return frozenset(found)
