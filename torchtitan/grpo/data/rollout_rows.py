# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Divides a rollout into the sequences that are trained: one for each context that the model saw.

A rollout has one, its prompt and its completion, unless a chat template rewrote earlier turns between
two turns (`types.NewRows`). Then each further context begins a sequence of its own, with the tokens
that the server was sent as its prompt. All sequences of a rollout have its sample id, and with it
its advantage and its weight, so that it counts as the one sample that it is.
"""

import numpy as np

from torchtitan.grpo.data.ratings import teacher_kl, teacher_top
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.types import Rollout, TopTokens


def sequences_of(rollout: Rollout, **settings: float) -> list[Sample]:
    """Returns the sequences of a rollout, in the order of its turns.

    Args:
        rollout: The rollout.
        settings: Further attributes of each sequence, such as its weight.
    """
    ids, logprobs = rollout.token_ids, np.asarray(rollout.logprobs)
    divergences, top = teacher_kl(rollout), teacher_top(rollout)
    prompts = [rollout.prompt_ids]
    begins, ends = [0], []
    for start, num_context in rollout.new_rows:
        ends.append(start)
        prompts.append(ids[start : start + num_context])
        begins.append(start + num_context)
    ends.append(len(ids))
    return [
        Sample(
            prompt,
            ids[begin:end],
            logprobs[begin:end],
            sampled=None if rollout.sampled is None else rollout.sampled[begin:end],
            teacher_kl=None if divergences is None else divergences[begin:end],
            teacher_top=(
                None if top is None else TopTokens(top.ids[begin:end], top.logprobs[begin:end])
            ),
            part=part,
            **settings,  # pyright: ignore[reportArgumentType]
        )
        for part, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True))
    ]
