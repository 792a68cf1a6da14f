"""docs/losses.md says what the code does: its settings load, and no choice is missing."""

import re

import pytest

from torchtitan.grpo.config_manager import load_config

BASE = """
[model]
hf_assets_path = "model"
[prompts]
path = "prompts.jsonl"
[reward]
functions = ["exact_match"]
[inference]
launch = true
[training]
seq_len = 32768
"""


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/losses.md").read_text()


def test_the_settings_of_every_paper_load(page, tmp_path):
    snippets = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(snippets) >= 10
    for snippet in snippets:
        file = tmp_path / "paper.toml"
        file.write_text(BASE + snippet)
        load_config([f"--job.config_file={file}"])
