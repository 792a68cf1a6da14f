# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds tokens whose row of the input embedding is zero, or equal to another token's."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer

from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.weight_wire.model_files import EMBEDDING, WeightFiles

_HEAD_COLUMNS = 16
_SHOWN = 3


def embedding_notes(model: HFModel, setting: str) -> Iterator[str]:
    """Yields warnings about embedding rows of the tokenizer's tokens. Servers sample no other tokens.

    A norm multiplies the gradient of a zero row by 1/sqrt(epsilon). Of each row only the first columns are
    read, unless they are zero or equal to those of another row.
    """
    try:
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    except Exception:  # the rollout process says why it cannot be read
        return
    names = {token: name for name, token in tokenizer.get_vocab().items()}
    known = sorted(token for token in names if token < model.vocab_size)
    ids, shape = torch.tensor(known, dtype=torch.int64), (model.vocab_size, model.model_args.dim)
    weight = WeightFiles(model.path, setting).read(EMBEDDING, shape)
    heads = weight[:, :_HEAD_COLUMNS][ids]
    zero = ids[~heads.any(dim=1)]
    zero = zero[~weight[zero].any(dim=1)].tolist()
    equal = [
        group
        for alike in _equal_rows(ids, heads)
        for group in _equal_rows(alike, weight[alike])
        if int(group[0]) not in zero
    ]

    def shown(tokens: Sequence[int]) -> str:
        listed = ", ".join(f"{names[token]!r} ({token})" for token in tokens[:_SHOWN])
        more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
        return f"{len(tokens)} of the tokenizer's tokens: {listed}{more}"

    if zero:
        yield (
            f"{setting} ({model.path}): {EMBEDDING} is zero for {shown(zero)}; grad_norm jumps when one "
            "of them is sampled, and clipping then loses the step, so give these rows ordinary values, "
            "such as the mean of the others."
        )
    if equal:
        tokens = torch.cat(equal).tolist()
        yield (
            f"{setting} ({model.path}): {EMBEDDING} has equal rows among {shown(tokens)}, which the model "
            "cannot tell apart; give them rows of their own if your prompts or answers have them."
        )


def _equal_rows(ids: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns groups of ids whose rows are equal byte by byte. ``rows`` is [ids, columns]."""
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for token, row in zip(ids.tolist(), rows.contiguous().view(torch.uint8).numpy(), strict=True):
        found[row.tobytes()].append(token)
    return [torch.tensor(group) for group in found.values() if len(group) > 1]
