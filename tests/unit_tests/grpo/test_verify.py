# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What is read from a run before its server is asked."""

import json
import re

import pytest

from torchtitan.grpo.verify import check_run, main

SUMMARY = {"steps": 2, "policy_version": 2, "server_version": 2, "weight_sync_failures": 0}


@pytest.fixture
def write_run(tmp_path):
    def write(mixed, **summary):
        records = [{"staleness/mixed_version_fraction": fraction} for fraction in mixed]
        (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | summary))
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
        return tmp_path

    return write


def test_a_run_that_pushed_into_requests_passes(write_run):
    assert all(check.holds for check in check_run(write_run([0.0, 0.25]), want_in_flight=True))


def test_an_idle_server_fails_with_what_to_change(write_run):
    run = write_run([0.0, 0.0])
    *others, in_flight = check_run(run, want_in_flight=True)
    assert all(check.holds for check in others)
    assert not in_flight.holds
    assert "Lower rollout.max_concurrent_rollouts" in in_flight.found
    assert all(check.holds for check in check_run(run, want_in_flight=False))


@pytest.mark.parametrize(
    "summary", [{"server_version": 1}, {"policy_version": 1}, {"weight_sync_failures": 1}]
)
def test_a_version_that_did_not_arrive_fails(write_run, summary):
    checks = check_run(write_run([0.5], **summary), want_in_flight=True)
    assert [check.holds for check in checks].count(False) == 1


def test_what_cannot_be_compared_is_refused_in_one_sentence(write_run, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1+1="}\n')
    command = ["--kind", "vllm", "--url", "http://127.0.0.1:9", "--prompts", str(prompts), "--run"]
    for run, message in (
        (tmp_path / "unfinished", "finished run with servers.*there is no such file"),
        (write_run([0.5]), r"column prompt, got none in .*prompts.jsonl:1\."),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*command, str(run)])
        assert re.search(message, capsys.readouterr().err)
