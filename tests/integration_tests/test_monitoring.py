# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A whole run is watched from outside, and stops with a checkpoint once all servers are lost."""

import json
import os
import re
import signal
import urllib.error
import urllib.request

ARGUMENTS = (
    "--inference.no-launch", "--grpo.prompts_per_step=2", "--training.steps=400",
    "--evaluation.num_prompts=4", "--inference.control_timeout_seconds=5",
    "--weight_sync.timeout_seconds=10", "--rollout.request_timeout_seconds=10",
    "--checkpoint.enable", "--checkpoint.interval=1000",
    "--observe.stuck_seconds=10", "--guards.servers_lost=stop",
)  # fmt: skip


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def address(run, process: str) -> str:
    (entry,) = json.loads((run.folder / f"monitoring/{process}.json").read_text())
    return f"http://{entry['targets'][0]}"


def health(url: str) -> tuple[int, dict]:
    status, text = get(f"{url}/healthz")
    return status, json.loads(text)


def test_a_run_is_watched_and_stops_with_a_checkpoint_without_servers(make_run, serve):
    server = serve()
    run = make_run(*ARGUMENTS, f"--inference.urls={server.url}")
    run.start()
    run.wait_for_step(4)

    rank0, rollout = address(run, "rank0"), address(run, "rollout")
    assert address(run, "servers") == server.url
    status, facts = health(rank0)
    assert (status, facts["status"]) == (200, "ok")
    assert facts["step"] >= 3
    assert facts["servers"][server.url]["state"] in ("ready", "syncing", "attesting")
    assert health(rollout)[1]["servers"][server.url]["state"] == "ready"
    assert health(server.url)[1]["status"] == "ok"
    text = get(f"{rank0}/metrics")[1]
    for name in ("grpo_grad_norm ", "grpo_guards_skipped 0.0", 'server_lag{server="0"}'):
        assert name in text
    assert "grpo_monitor_ready_servers 1.0" in get(f"{rollout}/metrics")[1]
    assert "grpo_server_tokens_total" in get(f"{server.url}/metrics")[1]

    os.killpg(server.process.pid, signal.SIGSTOP)
    # First nothing ends, and then the server is known to be lost.
    lost = "No server has been able to take work"
    run.wait_for(lambda: lost in health(rollout)[1].get("problem", ""))
    assert health(rollout)[0] == 503
    run.wait_for(lambda: health(rank0)[0] == 503)
    status, facts = health(rank0)
    assert "'waiting for rollouts' has lasted" in facts["problem"]
    assert facts["servers"][server.url]["state"] in ("lost", "joining")

    assert run.finish() != 0
    assert re.search(r"rank 0 .* ended with 3", run.console), run.console[-6000:]
    (message,) = run.errors()
    assert "no server has taken work for 6" in message
    assert "With guards.servers_lost = 'stop' the run ends here" in message
    step = run.metrics[-1]["step"]
    assert (run.folder / f"checkpoint/step-{step}").is_dir()
    assert f"Stopped after step {step}." in run.console
    assert not run.has_traceback(), run.console[-6000:]
    assert not list((run.folder / "monitoring").iterdir())
