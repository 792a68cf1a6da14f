# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[prompts]`` table: the training prompts."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchtitan.grpo.config.bounds import at_least


@dataclass
class Prompts:
    """``[prompts]``: the training prompts, and how their rollouts are distributed over ranks."""

    path: str = ""
    """Training prompts: a ``.jsonl`` or ``.parquet`` file, or the name or directory of a Hugging
    Face data set. Required unless ``paths`` is set."""

    paths: list[str] = field(default_factory=list)
    """Experimental: Several prompt sets instead of ``path``, mixed by ``weights``. All other
    settings of this table apply to each of them. Each prompt gets a column ``prompt_set``,
    unless it already has one. Its value is the file name without its extension, or the last
    part of the data set's name; if two sets would get the same value, it is the whole path.
    Reward, length and share of each are metrics (``reward/file/...``, ``rollout/file/...``)."""

    weights: list[float] = field(default_factory=list)
    """Experimental: Relative frequency with which each of ``paths`` is drawn from: one positive
    number for each. If it is empty, sets are drawn from in proportion to their size. Draws
    alternate in a fixed order, so that each batch has approximately these proportions. When all
    prompts of a set have been used, it starts again from its beginning."""

    name: str | None = None
    """Configuration name of a Hugging Face data set that has several, such as ``main`` of
    ``openai/gsm8k``. Not used for files."""

    split: str = "train"
    """Split of a Hugging Face data set. Rows in brackets, as in ``train[200:]``, are chosen from a
    file as well, for which the name before them is not used."""

    column: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages, which is rendered with
    the chat template of the tokenizer."""

    rename: dict[str, str] = field(default_factory=dict)
    """Columns to rename before use, as ``{old = "new"}``. A path such as
    ``{"reward_model.ground_truth" = "answer"}`` names a value within a column."""

    template: str | None = None
    """Python format string into which a string prompt is inserted, such as
    ``"Question: {prompt}\\nAnswer:"``. Of chat messages, it shapes the text of the last user turn.
    With None, the prompt is not changed."""

    system_prompt: str | None = None
    """Experimental: System message that is added in front of each prompt. The prompts must be
    chat messages, none of which may begin with its own system message. Reward functions receive
    it as the first message of ``prompts``. It is also added to held-out prompts. An empty text,
    or white space alone, is the same as None; some chat templates then write a system message
    of their own."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as ``{ enable_thinking = false }`` with Qwen3. The
    prompts must be chat messages, and the template must use each of the variables. They also apply
    to held-out prompts and to the replies of environments."""

    special_tokens: bool = False
    """Experimental: Whether the spelling of a special token, such as ``<|im_end|>``, in chat
    messages of others than the assistant is this token. With False, it is plain text, which
    cannot end a turn; also with environments and agents. Strings are always read with their
    special tokens."""

    shuffle: bool = True
    """Experimental: Shuffle the prompts in each epoch, seeded by ``debug.seed``."""

    max_prompt_tokens: Annotated[
        int, at_least(1).or_value(0, "training.seq_len minus rollout.max_new_tokens")
    ] = 0
    """Maximum length of a prompt, in tokens. Longer prompts are left out and counted."""

    single_rank_load: bool = True
    """Load the rollouts of a step on rank 0, which sends each rank its rows. With False, rank 0
    receives only lengths and rewards, and each rank fetches its own rollouts from the rollout
    process. This reduces the load on rank 0 if batches are large or there are many ranks."""

    balance_batch: bool = True
    """Distribute a batch over the data-parallel ranks by cost (Karmarkar-Karp), then pack the
    rollouts of each rank into rows. The cost is the number of floating-point operations of the
    loaded model, whose attention grows with the square of the sequence length. With False, the
    whole batch is packed first, and the rows are dealt to the ranks in snake order. Measured by
    ``benchmarks/balance.py``."""

    share_contexts: bool = True
    """Compute a prompt once for all completions of its group that stand in the same row, and
    the context with which rows of an episode begin. The numbers stay the same but for rounding.
    Rows of ``training.seq_len`` tokens must have room for a prompt and several completions; the
    metric ``time/shared_tokens_fraction`` shows what is saved. With False, each sequence has
    its own. Measured by ``benchmarks/shared_prompts.py``."""

    def chat_settings(self) -> dict[str, Any]:
        """Returns the settings for chat messages; a blank system prompt becomes None."""
        text = self.system_prompt
        system_prompt = None if text is None or not text.strip() else text
        return {"system_prompt": system_prompt, "chat_template_kwargs": self.chat_template_kwargs}
