# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The form in which a metric is described."""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Metric(NamedTuple):
    """The description of a metric, in Markdown.

    Attributes:
        key: Its key. ``{name}`` stands for a part that depends on the run.
        unit: Its unit; "fraction" is a number in [0, 1].
        meaning: What it measures, in one sentence or two.
        healthy: Which values are healthy.
        otherwise: What to look at or change if the value is another one.
    """

    key: str
    unit: str
    meaning: str
    healthy: str = "any"
    otherwise: str = ""

    def matches(self, key: str) -> bool:
        """Returns whether a key of a run is this metric's."""
        # An address may contain anything but a slash; a number is digits.
        parts = re.split(r"(\{\w+\})", self.key)
        pattern = "".join(
            re.escape(part) if i % 2 == 0 else r"\d+" if part == "{number}" else "[^/]+"
            for i, part in enumerate(parts)
        )
        return re.fullmatch(pattern, key) is not None


@dataclass(frozen=True)
class Section:
    """Metrics of one subject.

    Attributes:
        title: Heading.
        text: A paragraph on all of them.
        metrics: The metrics.
    """

    title: str
    text: str
    metrics: tuple[Metric, ...]
