"""docs/losses.md says what the code does: its settings load, and no choice is missing."""

import re
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.losses.policy_terms import BUILTIN

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
# Keys of [grpo] that other pages are about.
ELSEWHERE = re.compile(
    r"prompts_per_step|ref_model_|ptx_path|ptx_per_step|logprob_|context_parallel|async_|"
    r"packed_attention|hf_export|stop_timeout|max_pending_weight_grads|pipeline_memory|"
    r"recompute_early_blocks|lost_rank_seconds|pipeline_fill_gaps|pipeline_offload|"
    r"pipeline_chunk_tokens"
)


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


def test_every_choice_of_the_loss_is_on_the_page(page):
    for f in fields(GRPO):
        if ELSEWHERE.match(f.name):
            continue
        assert f"`{f.name}`" in page or f"{f.name} =" in page, f.name
        for choice in get_args(f.type) if get_origin(f.type) is Literal else ():
            assert f"`{choice}`" in page or f'"{choice}"' in page, f"{f.name} = {choice}"
    for name in BUILTIN:
        assert f"`{name}`" in page
