# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains on the examples of ``[sft]``, without servers, rollout process or rewards."""

from collections.abc import Callable
from dataclasses import replace

from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.data.examples import ExampleStream
from torchtitan.grpo.data.planner import PlannedPart, StepPlanner, open_sample_log
from torchtitan.grpo.data.rows import Sample
from torchtitan.grpo.data.step_source import OfflineSource
from torchtitan.grpo.job_config import JobConfig
from torchtitan.grpo.models.hf_config import HFModel
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.system.logs import logger
from torchtitan.grpo.types import PromptProgress


class SupervisedSource(OfflineSource):
    """Plans steps of supervised examples; see :class:`StepSource`.

    The loss of an example is that of the supervised sequences that GRPO mixes in
    (``grpo.ptx_path``), so that rows, layouts and loss are the same code. The ``position`` of
    ``progress`` counts the rows that were read, of all epochs. Raises :class:`DataError` if
    ``sft.path`` is unusable.
    """

    is_exhausted = False

    def __init__(
        self,
        config: JobConfig,
        model: HFModel,
        *,
        start_version: int,
        progress: PromptProgress,
        date: str,
        should_stop: Callable[[], bool],
    ) -> None:
        assert config.sft.path is not None
        super().__init__()
        self.config = config
        self.progress = progress
        self._should_stop = should_stop
        self._planner = StepPlanner(config, model)
        self._examples = open_examples(
            config, model, config.sft.path, "sft.path", progress, date=date
        )
        self.samples = open_sample_log(config, model, start_version)

    def start(self) -> None:
        """Says how many examples there are; each is read when its step comes."""
        path, checked = self.config.sft.path, self._examples.checked
        logger.info(f"sft.path: {path}, {checked.describe()}")
        notes = [checked.warning("sft.path", str(path)), *self._examples.notes()]
        for note in filter(None, notes):
            logger.warning(note)
        if evaluation_sets(self.config.evaluation):
            logger.info(
                "[evaluation] is not used with sft.path: there is no server to ask. "
                "sft.held_out_path measures the loss of held-out examples."
            )

    def next_step(self, version: int, num_ranks: int) -> PlannedPart | None:
        if self._should_stop():
            return None
        examples = [self._examples.next() for _ in range(self.config.sft.examples_per_step)]
        self.progress = PromptProgress(self._examples.position)
        step = self._planner.plan_supervised(examples, num_ranks=num_ranks)
        return replace(step, metrics=step.metrics | self._metrics(examples))

    def _metrics(self, examples: list[Sample]) -> dict[str, float]:
        return {
            "sft/epoch": self._examples.position / len(self._examples),
            "sft/example_tokens_mean": sum(e.num_tokens for e in examples) / len(examples),
            "sft/too_long_examples": float(self._examples.num_too_long),
            "sft/unusable_examples": float(self._examples.num_unusable),
        }

    def close(self) -> None:
        self._examples.close()
        self.samples.close()


def open_examples(
    config: JobConfig,
    model: HFModel,
    path: str,
    key: str,
    progress: PromptProgress | None = None,
    *,
    date: str = "",
) -> ExampleStream:
    """Opens a file of examples, or raises :class:`DataError`.

    A resumed run continues at ``progress``. ``date`` is what chat templates take for now; empty
    is the time of the first rendering.
    """
    limit = config.sft.max_example_tokens
    variables = config.prompts.chat_template_kwargs
    codec = TextCodec(str(model.path), model.eos_token_ids, variables, date)
    return ExampleStream(
        path,
        key,
        config.sft,
        config.prompts,
        codec,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        max_tokens=min(limit or config.training.seq_len, config.training.seq_len),
        seed=config.debug.seed or 0,
        position=progress.position if progress is not None else 0,
    )
