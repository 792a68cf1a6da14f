# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Loads a transformers model, and runs its prefill and decode steps over the slots."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from torchtitan.grpo.inference.embedded.kv_cache import SlotCache

logger = logging.getLogger(__name__)

_ATTENTION = "grouped_sdpa"
# Number of positions whose logits over the vocabulary are in memory at once.
_LOGIT_ROWS = 256


def _grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention that does not copy keys and values for each query head of a group.

    ``attention_mask`` is ``None`` for whole sequences, whose attention is causal, or an additive
    mask [rows, 1, 1, length] for one token a row. In the latter case the query heads of a group are
    treated as query positions of one head.
    """
    rows, num_heads, seq_len, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if attention_mask is not None:
        query = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=attention_mask is None and num_heads != num_kv_heads,
    )
    output = output.reshape(rows, num_heads, seq_len, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _grouped_sdpa)


class ModelRunner:
    """A causal language model and the slots of its running requests.

    Only the engine's thread uses it after the engine has started.

    Args:
        model: Model on its device, in its dtype.
        max_slots: Maximum number of rows.
        max_length: Maximum length of a sequence, prompt and completion together.
    """

    def __init__(self, model: PreTrainedModel, max_slots: int, max_length: int) -> None:
        _check_attention(model)
        model.config._attn_implementation = _ATTENTION
        self.model = model.eval().requires_grad_(False)
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size: int = model.config.vocab_size
        self.max_slots = max_slots
        self.max_length = max_length
        self.cache = SlotCache(max_slots, max_length)

    def prefill(
        self, sequences: list[list[int]], slots: list[int], sources: list[int] | None
    ) -> torch.Tensor:
        """Computes whole sequences and stores their keys and values.

        Args:
            sequences: Token ids of each sequence, at least one.
            slots: Slot of each new row.
            sources: For each slot the index of its sequence; ``None`` is the identity.

        Returns:
            [len(slots), vocab] logits after each row's last token.
        """
        lengths = [len(tokens) for tokens in sequences]
        longest = max(lengths)
        # Padded on the right, where a causal mask hides the padding from all real tokens.
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in sequences]
        picked = None if sources is None else torch.tensor(sources, device=self.device)
        self.cache.plan_prefill(torch.tensor(slots, device=self.device), picked, longest)
        hidden = self.model.model(
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=torch.arange(longest, device=self.device).unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(sequences), device=self.device)
        last = hidden[rows, torch.tensor(lengths, device=self.device) - 1]
        logits = self.model.lm_head(last)
        return logits if picked is None else logits[picked]

    def decode(
        self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Computes one token of each row.

        Args:
            ids: [rows] long, newest token of each row.
            rows: [rows] long, ``0 .. num_rows``.
            positions: [rows] long, position of that token.
            longest: Largest position plus 1.

        Returns:
            [rows, vocab] logits.
        """
        self.cache.plan_decode(rows, positions, longest)
        hidden_from = torch.arange(longest, device=self.device) > positions.unsqueeze(1)
        mask = torch.zeros(hidden_from.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(hidden_from, float("-inf"))[:, None, None, :]
        hidden = self.model.model(
            input_ids=ids.unsqueeze(1),
            attention_mask=mask,
            position_ids=positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return self.model.lm_head(hidden[:, 0])

    def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of each token but the first, without using the slots.

        Returns:
            [len(tokens) - 1] log-probabilities at temperature 1.
        """
        ids = torch.tensor([tokens], device=self.device)
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        found: list[float] = []
        for part, targets in zip(
            hidden.split(_LOGIT_ROWS), ids[0, 1:].split(_LOGIT_ROWS), strict=True
        ):
            logprobs = torch.log_softmax(self.model.lm_head(part).float(), dim=-1)
            found += logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).tolist()
        return found


def _check_attention(model: PreTrainedModel) -> None:
    """Raises ValueError for models that the slots or the logits of this server do not support."""
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(
            f"The embedded server needs full attention in every layer; {config.model_type} has "
            f"{sorted(layer_types)}. Serve this model with vLLM or SGLang."
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


def load_model(path: str, device: str, dtype: str) -> PreTrainedModel:
    """Loads the model of a Hugging Face directory, without downloading anything.

    Args:
        path: Directory with config.json and safetensors files.
        device: ``auto``, ``cpu`` or ``cuda``; ``auto`` is CUDA if there is a GPU.
        dtype: ``auto``, ``float32`` or ``bfloat16``; ``auto`` is float32 on CPU, bfloat16
            on CUDA.

    Raises:
        ValueError: If the directory has no config.json.
    """
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"--model-path must be a Hugging Face directory with a config.json, got {path}."
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=AutoConfig.from_pretrained(path, local_files_only=True),
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        local_files_only=True,
    )
    # pyright does not understand how transformers decorates `to`.
    return model.to(device=torch.device(device))  # pyright: ignore[reportCallIssue]


def load_tokenizer(path: str) -> Tokenizer | None:
    """Loads the directory's tokenizer.json, or returns ``None``: answers then have no text."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        logger.info("There is no tokenizer.json in %s, so answers have no text.", path)
        return None
    return Tokenizer.from_file(str(file))


def read_eos_ids(path: str) -> frozenset[int]:
    """Returns the end-of-sequence ids of config.json and generation_config.json together."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(path) / name
        if file.is_file():
            eos = json.loads(file.read_text()).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(found)
