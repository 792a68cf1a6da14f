# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What the check of a prompt set's rows has found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckedRows:
    """What the check of a set has found.

    Attributes:
        num_rows: Rows of the set.
        num_checked: Rows that were read and judged.
        num_tokenized: Prompts that were tokenized, or have too many characters for that.
        num_fitting: Those of them that are short enough.
        limit: The longest prompt that is taken, with the settings from which it follows.
        remedy: What makes more prompts fit.
    """

    num_rows: int
    num_checked: int
    num_tokenized: int
    num_fitting: int
    limit: str
    remedy: str

    def describe(self) -> str:
        """Returns how many rows were checked, and how many prompts fit, for one line."""
        text = f"all {self.num_rows:,} rows checked"
        if self.num_checked < self.num_rows:
            text = (
                f"{self.num_checked:,} of {self.num_rows:,} rows checked, and a bad one among the others "
                "will be left out"
            )
        sampled = "" if self.num_tokenized == self.num_rows else " that were tokenized"
        return f"{text}; {self.num_fitting:,} of {self.num_tokenized:,} prompts{sampled} fit"

    def warning(self, key: str, path: str) -> str | None:
        """Returns a warning if most prompts are too long."""
        if 2 * self.num_fitting >= self.num_tokenized:
            return None
        return (
            f"{key}: only {self.num_fitting:,} of {self.num_tokenized:,} prompts of {path} fit: at most "
            f"{self.limit} are taken. The others are left out. {self.remedy}"
        )
