# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The supervised mix-in (ptx), as in PPO-ptx of InstructGPT (https://arxiv.org/abs/2203.02155).

Each step also minimizes the negative log-likelihood of some given completions.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.prompts.prompt_set import check_vocabulary
from torchtitan.grpo.rollout.prompts.prompt_stream import EpochOrder
from torchtitan.grpo.rollout.tables.jsonl import JsonlTable
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.errors import DataError
from torchtitan.grpo.system.files import check_regular
from torchtitan.grpo.system.logs import logger

_KEY = "grpo.ptx_path"


class PtxStream:
    """An endless stream of the tokenized examples of ``grpo.ptx_path``, shuffled anew in each epoch.

    The constructor reads the whole file, so that a bad example raises :class:`DataError` before
    training. An end-of-sequence token is appended to completions that do not end in one.
    ``num_too_long`` counts the examples that are left out because they are longer than a row.
    """

    def __init__(self, config: JobConfig, model: HFModel) -> None:
        assert config.grpo.ptx_path is not None
        path, row_len = config.grpo.ptx_path, config.training.seq_len
        self._codec = TextCodec(str(model.path), model.eos_token_ids)
        self._eos, self._vocab_size = model.eos_token_ids, model.vocab_size
        self._samples: list[Sample] = []
        self.num_too_long = 0
        for where, row in _rows(path):
            try:
                sample = self._tokenize(row)
            except ValueError as error:
                raise DataError(f"{_KEY}: {where}: {error}") from error
            if sample.num_tokens <= row_len:
                self._samples.append(sample)
            else:
                self.num_too_long += 1
        if not self._samples:
            raise DataError(
                f"{_KEY}: {path} must hold an example of at most training.seq_len ({row_len}) tokens, "
                f"got {self.num_too_long} examples that are longer and none that fits."
            )
        seed = config.debug.seed or 0
        self._order = EpochOrder(len(self), seed=seed, set_number=0, shuffle=True)
        logger.info(
            f"{_KEY}: {len(self)} examples of {path}; {self.num_too_long} examples are left out "
            f"because they are longer than training.seq_len ({row_len})."
        )

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, step: int, num_examples: int) -> list[Sample]:
        """Returns the examples for the step after ``step`` batches; a resumed run takes the same examples.

        The caller must still set the weights of the examples.
        """
        first = step * num_examples
        return [self._samples[self._order.row(first + i)] for i in range(num_examples)]

    def _tokenize(self, row: dict[str, Any]) -> Sample:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(completion, str) or not isinstance(prompt, str | None):
            raise ValueError(
                f"an example must have a string completion, and may have a string prompt, got {row!r:.200}."
            )
        # Prompt and completion are tokenized separately, as they are for a rollout. Without a prompt
        # there is still the beginning-of-sequence token, if the tokenizer has one.
        prompt_ids, ids = (
            self._codec.encode(prompt or ""),
            self._codec.encode_continuation(completion),
        )
        if not ids:
            raise ValueError(f"the completion must have a token, got {completion!r}.")
        if ids[-1] not in self._eos:
            ids.append(self._eos[0])
        check_vocabulary([*prompt_ids, *ids], self._vocab_size)
        sample = Sample(np.array(prompt_ids, np.int32), np.array(ids, np.int32), None)
        if sample.num_predicted == 0:
            raise ValueError(
                "the example must have a token before its last one, got a single token. Add a prompt "
                "or a longer completion."
            )
        return sample


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row of the file, preceded by its place in the file for error messages."""
    try:
        check_regular(path)
        with closing(JsonlTable(path, {}, None, _KEY)) as table:
            for i in range(len(table)):
                yield table.where(i), table.row(i)
    except OSError as error:
        raise DataError(f"{_KEY}: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(str(error)) from error
