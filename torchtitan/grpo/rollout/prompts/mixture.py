# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The sets that prompts are drawn from, and their proportions."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.prompts.interleaving import Interleaving
from torchtitan.grpo.rollout.prompts.prompt_set import PromptSet
from torchtitan.grpo.rollout.tokenizer import TextCodec

logger = logging.getLogger(__name__)


class PromptMixture:
    """Prompt sets with weights. A single set is a mixture of one.

    Args:
        sets: At least one set.
        weights: One positive number per set. An empty list weights the sets by their sizes, so
            that all of them end their epochs together.
    """

    def __init__(self, sets: Sequence[PromptSet], weights: Sequence[float] = ()) -> None:
        assert not weights or len(weights) == len(sets), (
            f"{len(weights)} weights for {len(sets)} sets"
        )
        self.sets = list(sets)
        self.interleaving = Interleaving(weights or [len(prompts) for prompts in sets])

    def __len__(self) -> int:
        return sum(len(prompts) for prompts in self.sets)

    @property
    def file_names(self) -> list[str]:
        """A short name of each set, for metrics; empty if there is one set."""
        if len(self.sets) == 1:
            return []
        return short_names([prompts.path.partition(" (split ")[0] for prompts in self.sets])

    def close(self) -> None:
        """Closes all tables."""
        with ExitStack() as stack:
            for prompts in self.sets:
                stack.callback(prompts.close)


def open_mixture(config: RolloutProcessConfig, codec: TextCodec) -> PromptMixture:
    """Opens ``prompts.path``, or all of ``prompts.paths``.

    Raises:
        ValueError: If a set is missing, empty or unreadable, or lacks the prompt column.
    """
    settings = config.prompts
    paths, key = (settings.paths, "prompts.paths") if settings.paths else (None, "prompts.path")
    with ExitStack() as stack:
        sets = [
            stack.enter_context(
                closing(
                    PromptSet.open(
                        path, settings.split, config, codec, key, settings.name, set_name
                    )
                )
            )
            for path, set_name in (_named(paths) if paths else [(settings.path, None)])
        ]
        mixture = PromptMixture(sets, settings.weights)
        stack.pop_all()
    for prompts, weight in zip(sets, mixture.interleaving.weights, strict=True):
        fraction = weight / mixture.interleaving.period
        logger.info(
            "%s: %d prompts, %.3g %% of the draws", prompts.path, len(prompts), 100 * fraction
        )
    return mixture


def _named(paths: list[str]) -> list[tuple[str, str]]:
    """Returns each path with a unique name: its stem, or the path if stems are not unique."""
    stems = [_stem(path) for path in paths]
    are_unique = len(set(stems)) == len(paths)
    return list(zip(paths, stems if are_unique else paths, strict=True))


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns a unique name without slashes for each of different paths.

    It is the stem, with as many of the folders before it as tell it apart from the others.

    Example: ``a/train.jsonl``, ``b/train.jsonl`` and ``c/more.jsonl`` give ``a-train``, ``b-train`` and
    ``more``.
    """
    parts = [(*Path(path).parts[:-1], _stem(path)) for path in paths]
    names: list[str] = []
    for own in parts:
        length = 1
        while sum(other[-length:] == own[-length:] for other in parts) > 1 and length < len(own):
            length += 1
        base = name = "-".join(part.strip("/") for part in own[-length:]).strip("-")
        number = 1
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.append(name)
    return names


def _stem(path: str) -> str:
    # Names of data sets may contain dots, as in "owner/set-v1.5".
    last = Path(path)
    if last.name in ("", ".."):  # the working folder or the one above it
        last = last.resolve()
    return last.stem if last.suffix in (".jsonl", ".json", ".parquet") else last.name
