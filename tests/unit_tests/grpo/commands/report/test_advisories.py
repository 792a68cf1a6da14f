# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Each advisory appears in a run with its fault, and in no healthy one."""

import json

import pytest
from made_run import make_run

from torchtitan.grpo.commands.report.content import Run

SERVER = "servers/10.0.0.2:8000"
FAULTS = {
    "equal rewards": ({"reward/equal_groups_fraction": 0.8}, "In 80% of the last groups"),
    "stale samples": ({"staleness/max_steps": 9.0}, "at most 9"),
    "cut completions": ({"rollout/length_fraction": 0.4}, "40% of the last completions were cut"),
    "server behind": ({f"{SERVER}/version": lambda step: step - 5}, "10.0.0.2:8000 is 5.0 versions"),
    "slow server": ({f"{SERVER}/token_seconds": 0.06}, "10.0.0.2:8000 takes 3.0 times as long"),
    "KV cache full": ({f"{SERVER}/kv_use": 0.97}, "10.0.0.2:8000 has 97% of its KV cache"),
    "no gradient": ({"grad_norm": lambda step: 0.0 if step == 9 else 1.0}, "Steps without a gradient: 1, the first is step 9"),
    "worse policy": ({"evaluation/score": lambda step: 0.9 if step < 20 else 0.4}, "fell from 0.9 to 0.4 while the reward rose"),
    "length collapse": ({"rollout/completion_tokens_mean": lambda step: 200 / step}, "while completions shrank"),
    "unscored": ({"rollout/unscored_fraction": 0.05, "rollout/unscored_by_service": 2.0}, "60 by the service"),
    "mismatch": ({"mismatch/kl": 0.2}, "differ by 0.2 nats"),
    "entropy collapse": ({"policy/entropy": lambda step: 1 / step**2}, "exploration has ended"),
    "failed pushes": ({"weight_sync/failures": 2.0}, "lost to pushes 2 times"),
}  # fmt: skip


def advised(folder):
    run = Run(folder)
    run.update()
    return {one["id"]: one for one in run.content()["advisories"]}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_figures(tmp_path, name):
    changed, text = FAULTS[name]
    make_run(tmp_path, 30, groups=1, size=2, **changed)
    found = advised(tmp_path)
    assert set(found) == {"waits for judge", name}
    assert text in found[name]["text"]
    assert found[name]["change"] and found[name]["chart"]


def test_a_healthy_run_has_only_its_causes_and_only_large_ones(tmp_path):
    make_run(tmp_path, 30, groups=1, size=2)
    assert list(advised(tmp_path)) == ["waits for judge"]
    summary = {"causes": [{"cause": "judge", "fraction": 0.01, "text": "little"}, "damaged", None]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert advised(tmp_path) == {}


def test_causes_of_a_run_without_summary_come_from_its_waits(tmp_path):
    make_run(tmp_path, 30, groups=1, size=2)
    (tmp_path / "summary.json").unlink()
    found = advised(tmp_path)
    assert list(found) == ["waits for judge", "waits for generation", "waits for tail"]
    assert "waited for the judge; let more servers judge" in found["waits for judge"]["text"]
    assert found["waits for judge"]["change"] == "reward.judge.max_concurrent"
    (tmp_path / "starts/1/config.toml").write_text("[settings]\nof = 'an earlier release'\n")
    assert advised(tmp_path) == {}


def test_without_evaluations_a_reward_that_falls_is_told(tmp_path):
    make_run(tmp_path, 30, groups=1, size=2, **{"reward/mean": lambda step: 0.9 - step / 100})
    assert list(advised(tmp_path)) == ["waits for judge"]  # the score of evaluations rises
    (tmp_path / "evaluations.jsonl").unlink()
    assert "The reward fell from 0.865 to 0.625." in advised(tmp_path)["worse policy"]["text"]


def test_each_cause_leads_to_the_chart_that_shows_it(tmp_path):
    make_run(tmp_path, 30, groups=1, size=2)
    causes = [{"cause": name, "fraction": 0.5, "text": name} for name in ("judge", "plan")]
    (tmp_path / "summary.json").write_text(json.dumps({"causes": causes}))
    assert [one["chart"] for one in advised(tmp_path).values()] == ["waits", "trainer"]


def test_a_gradient_of_null_is_no_gradient(tmp_path):
    make_run(tmp_path, 30, groups=1, size=2, grad_norm=lambda step: None if step in (3, 4) else 1.0)
    assert (
        "Steps without a gradient: 2, the first is step 3"
        in advised(tmp_path)["no gradient"]["text"]
    )
