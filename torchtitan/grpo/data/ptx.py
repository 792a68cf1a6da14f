# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The supervised mix-in (ptx): an endless, shuffled, resumable stream of text.

As in InstructGPT's PPO-ptx (https://arxiv.org/abs/2203.02155): each step also lowers the
negative log-likelihood of some given completions.
"""

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import msgspec
import numpy as np

from torchtitan.grpo.data.files import DataError, decode_line
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.rollout.tokenizer import TextCodec

_KEY = "grpo.ptx_path"


class _PtxRow(msgspec.Struct):
    completion: str
    prompt: str | None = None


class PtxStream:
    """The rows of ``grpo.ptx_path``, tokenised; each epoch in a permutation of its own.

    The whole file is read at construction, so that a bad row is found before training.

    Args:
        path: A ``.jsonl`` file: ``completion`` and, where there is one, ``prompt``.
        codec: The model's tokenizer.
        eos_token_ids: The first ends each completion that does not end in one of them.
        vocab_size: Token ids must be below it.
        row_len: ``training.seq_len``; longer rows are left out.
        seed: ``debug.seed``.

    Attributes:
        num_too_long: Rows left out.

    Raises:
        DataError: The file or a row of it cannot be used, or all rows are too long.
    """

    def __init__(
        self,
        path: str,
        codec: TextCodec,
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        row_len: int,
        seed: int,
    ) -> None:
        self._codec, self._eos, self._vocab_size = codec, tuple(eos_token_ids), vocab_size
        self._seed = seed
        self._epoch, self._order = -1, np.arange(0)
        self._samples: list[Sample] = []
        self.num_too_long = 0
        for where, row in _rows(path):
            sample = self._tokenise(row, where)
            if sample.num_tokens <= row_len:
                self._samples.append(sample)
            else:
                self.num_too_long += 1
        if not self._samples:
            raise DataError(
                f"{_KEY}: {path} must hold a row of at most training.seq_len ({row_len}) tokens, "
                f"got {self.num_too_long} that are longer and none that fits."
            )

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._samples)

    def take(self, step: int, num_rows: int) -> list[Sample]:
        """The rows of one step; weights are the plan's to set.

        Args:
            step: Batches trained on before; a resumed run therefore continues the order.
            num_rows: ``grpo.ptx_per_step``.
        """
        return [self._samples[self._row(step * num_rows + i)] for i in range(num_rows)]

    def _row(self, index: int) -> int:
        epoch, offset = divmod(index, len(self._samples))
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._order, self._epoch = rng.permutation(len(self._samples)), epoch
        return int(self._order[offset])

    def _tokenise(self, row: _PtxRow, where: str) -> Sample:
        # Apart, as a rollout's are: the model is to write the completion behind the prompt.
        # Without a prompt there is still the tokenizer's beginning of sequence, if it has one.
        prompt = self._codec.encode(row.prompt or "")
        completion = self._codec.encode_continuation(row.completion)
        if not completion:
            raise DataError(f"{where}: the completion must have a token, got {row.completion!r}.")
        if completion[-1] not in self._eos:
            completion.append(self._eos[0])
        largest = max(prompt + completion)
        if largest >= self._vocab_size:
            raise DataError(
                f"{where}: the tokenizer gives token id {largest}, and the model's vocabulary has "
                f"{self._vocab_size} entries. The tokenizer and config.json in "
                "model.hf_assets_path do not belong together."
            )
        sample = Sample(np.array(prompt, np.int32), np.array(completion, np.int32), None)
        if sample.num_predicted == 0:
            raise DataError(f"{where}: nothing comes before the completion's only token.")
        return sample


def _rows(path: str) -> Iterator[tuple[str, _PtxRow]]:
    """The rows of the file, each with its place. Blank lines are passed over."""
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(f"{_KEY}: {path} cannot be read: {error.strerror}.") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{_KEY}: {path}:{number}"
                yield where, decode_line(line, _PtxRow, where)
