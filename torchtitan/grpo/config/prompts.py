# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[prompts]`` table: the training prompts."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Prompts:
    """``[prompts]``: what is asked."""

    path: str = ""
    """A ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging Face data
    set. Required, unless ``paths``."""

    paths: list[str] = field(default_factory=list)
    """Several sets in place of ``path``, mixed by ``weights``. ``name``, ``split``,
    ``column``, ``rename`` and ``template`` are those of all of them. Each prompt is given the
    column ``prompt_set``, unless it has one: the set's file name without its ending, or
    its last name at the hub; the whole path where two sets would be named alike."""

    weights: list[float] = field(default_factory=list)
    """How often each of ``paths`` is drawn from, one positive number each, of any sum; empty
    is by their sizes. Draws alternate in a fixed order, so that every batch has nearly these
    proportions. A set that is at its end begins anew while others go on."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several, such as ``main`` of
    ``openai/gsm8k``; not used for JSONL."""

    split: str = "train"
    """Split of a Hugging Face data set; not used for JSONL."""

    column: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages, which the
    tokenizer's chat template turns into text."""

    rename: dict[str, str] = field(default_factory=dict)
    """Columns renamed before use, as ``{old = "new"}``."""

    template: str | None = None
    """Python format string around a string prompt, such as ``"Question: {prompt}\\nAnswer:"``.
    None leaves the prompt as it is."""

    shuffle: bool = True
    """Shuffle anew each epoch, by ``debug.seed``."""

    max_prompt_tokens: int = 0
    """Longer prompts are left out, and counted; 0 is ``training.seq_len`` less
    ``rollout.max_new_tokens``."""

    single_rank_load: bool = True
    """Rank 0 loads the rollouts of a step and scatters each rank its rows. False: rank 0 is
    told of their lengths and rewards alone, and every rank fetches its own share from the
    rollout process, which spares rank 0 where batches are large or ranks are many."""

    balance_batch: bool = True
    """Spread a batch over data-parallel ranks by cost (Karmarkar-Karp) before it is packed
    into rows. False packs first and deals rows in snake order."""

    balance_cost: Literal["tokens", "flops"] = "flops"
    """What is balanced: tokens, or the floating-point operations of the loaded model, in
    which attention grows with the square of a sequence's length."""

    row_bucket: int = 1
    """Each rank's rows are filled up to a multiple of this many microbatches, so that
    pipelines see few shapes; what that costs is in ``data/padding_fraction``."""
