# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[prompts]`` table: the training prompts."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.bounds import at_least


@dataclass
class Prompts:
    """``[prompts]``: the training prompts, and how their rollouts are spread over ranks."""

    path: str = ""
    """Prompts of the run: a ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging
    Face data set. Required unless ``paths`` is set."""

    paths: list[str] = field(default_factory=list)
    """Several prompt sets in place of ``path``, mixed by ``weights``. All other keys of this table
    apply to each of them. Each prompt gets a column
    ``prompt_set`` unless it has one: the file's name without its ending, or the last part of a
    data set's name; the whole path if two sets would get the same name."""

    weights: list[float] = field(default_factory=list)
    """How often each of ``paths`` is drawn from, relative to the others: one positive number for
    each. Empty draws from each set in proportion to its size. Draws alternate in a fixed order, so
    that each batch has nearly these proportions. A set that has been used up starts again from its
    beginning."""

    name: str | None = None
    """Configuration of a Hugging Face data set that has several, such as ``main`` of
    ``openai/gsm8k``. Not used for files."""

    split: str = "train"
    """Split of a Hugging Face data set. Not used for files."""

    column: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages, which the chat template
    of the tokenizer turns into text."""

    rename: dict[str, str] = field(default_factory=dict)
    """Columns to rename before use, as ``{old = "new"}``."""

    template: str | None = None
    """Python format string around a string prompt, such as ``"Question: {prompt}\\nAnswer:"``. None
    leaves the prompt as it is. Prompts that are chat messages refuse it."""

    system_prompt: str | None = None
    """System message that is put in front of each prompt. Needs prompts that are chat messages, of
    which none may begin with a system message of its own. Reward functions receive it as the first
    message of ``prompts``. Held-out prompts get it as well."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as ``{ enable_thinking = false }`` with Qwen3. Needs
    prompts that are chat messages, and a template that reads each of the variables. Held-out prompts
    and the replies of environments are rendered with them as well."""

    shuffle: bool = True
    """Shuffle the prompts in each epoch, seeded by ``debug.seed``."""

    max_prompt_tokens: Annotated[
        int, at_least(1).or_value(0, "training.seq_len minus rollout.max_new_tokens")
    ] = 0
    """Length, in tokens, above which prompts are left out. The run counts them."""

    single_rank_load: bool = True
    """Rank 0 loads the rollouts of a step and sends each rank its rows. With False rank 0 receives
    the lengths and rewards only, and each rank fetches its own rollouts from the rollout process,
    which relieves rank 0 if batches are large or ranks are many."""

    balance_batch: bool = True
    """Spread a batch over the data-parallel ranks by cost (Karmarkar-Karp), then pack the rollouts
    of each rank into rows. With False the whole batch is packed first, and the rows are dealt to
    the ranks in snake order."""

    balance_cost: Literal["tokens", "flops"] = "flops"
    """The cost that ``balance_batch`` balances: the number of tokens, or the number of
    floating-point operations in the loaded model, whose attention grows with the square of a
    sequence's length."""

    row_bucket: Annotated[int, at_least(1)] = 1
    """The number of rows on each rank is rounded up to a multiple of this many microbatches, so
    that pipelines see few different shapes. The metric ``data/padding_fraction`` shows the cost."""
