# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The page of ``--help`` shows every setting, this project's first."""

from torchtitan.grpo.config.command_line.arguments import is_flag
from torchtitan.grpo.config.command_line.help_page import (
    FIRST_TABLES,
    HEADINGS,
    OFTEN_SET,
    help_words,
    page,
    settings,
)
from torchtitan.grpo.config.command_line.keys import settings as all_settings
from torchtitan.grpo.config.job_config import JobConfig


def test_every_setting_is_on_the_page_and_ours_come_first():
    text = page(JobConfig, [])
    ours, theirs = text.split("Torchtitan's settings")
    for setting in settings(JobConfig):
        table, _, name = setting.key.rpartition(".")
        if setting.doc.startswith(("Must stay", "DEPRECATED")):
            assert f"--{setting.key} " not in text
        elif setting.table in FIRST_TABLES:
            dotted = f"{table}." if table else ""
            assert f"\n  --{dotted}{'[no-]' if is_flag(setting.type) else ''}{name}" in ours
        else:
            assert f"\n  --{table.partition('.')[0]}." in theirs
            assert name in theirs
    assert ours.index("\nPrompts\n") < ours.index("\nPolicy loss\n") < ours.index("\nServers\n")


def test_a_word_shows_the_full_text_of_what_it_names():
    text = page(JobConfig, ["clip_high"])
    assert "--grpo.clip_high X (0.2)" in text
    assert "DAPO uses 0.28" in text
    assert "Default: 0.2. Valid: above 0." in text
    assert "--grpo.clip_low" not in text
    assert page(JobConfig, ["evaluation"]).count("\n  --evaluation.") >= 5
    assert "No setting's name contains 'clib'" in page(JobConfig, ["clib"])


def test_headings_stand_at_settings_that_there_are_and_help_is_asked_for_with_or_without_words():
    keys = [setting.key for setting in settings(JobConfig)]
    assert sorted(keys) == sorted(all_settings(JobConfig))
    assert set(HEADINGS) <= set(keys)
    tables = {key.partition(".")[0] for key in keys}
    assert {*FIRST_TABLES, *OFTEN_SET} <= tables
    assert help_words(["--grpo.group_size=4"]) is None
    assert help_words(["--job.config_file=x", "--help"]) == []
    assert help_words(["-h", "grpo"]) == ["grpo"]
    assert help_words(["--help", "grpo", "--debug.seed=1"]) == ["grpo"]
