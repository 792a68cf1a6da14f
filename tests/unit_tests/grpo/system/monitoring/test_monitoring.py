# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a process serves to whoever watches it: real sockets, and Prometheus' own parser."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.metrics_processor import RankMonitor
from torchtitan.grpo.observe.phases import Phases
from torchtitan.grpo.system.monitoring.addresses import (
    KEY_VARIABLE,
    remove_address,
    write_address,
)
from torchtitan.grpo.system.monitoring.site import (
    Health,
    MonitorError,
    MonitorSite,
    MonitorThread,
    exposition,
    prometheus_name,
)

HOST = "127.0.0.1"
WELL = Health(None)


def get(port: int, path: str, key: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{HOST}:{port}{path}")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    threads: list[MonitorThread] = []

    def start(health: Health = WELL, key: str = "", port: int = 0, **values: float) -> int:
        monkeypatch.setenv(KEY_VARIABLE, key)
        site = MonitorSite(lambda: health, lambda: values, (HOST, port), str(tmp_path), "rank0")
        threads.append(MonitorThread(site))
        _, found = threads[-1].start()
        assert f":{found}" in (tmp_path / "monitoring/rank0.json").read_text()
        return found

    yield start
    for thread in threads:
        thread.close()
        thread.close()
    assert not list(tmp_path.glob("monitoring/rank0.json"))
    assert "monitor" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("key", "name", "server"),
    [
        ("grad_norm", "grpo_grad_norm", None),
        ("weight_sync/push_seconds", "grpo_weight_sync_push_seconds", None),
        ("weight_sync/server12/lag", "grpo_weight_sync_server_lag", "12"),
        ("servers/10.0.0.7:8000/running", "grpo_servers_running", "10.0.0.7:8000"),
        ("reward/my.rewards:f", "grpo_reward_my_rewards_f", None),
    ],
)
def test_keys_become_names_and_labels(key, name, server):
    assert prometheus_name(key) == (name, server)


def test_prometheus_reads_what_is_served():
    values = {"grad_norm": 0.5, "loss/total": float("nan"), "weight_sync/server0/lag": 1.0}
    values["weight_sync/server1/lag"] = 2.0
    families = {f.name: f for f in text_string_to_metric_families(exposition(values).decode())}
    assert families["grpo_grad_norm"].samples[0].value == 0.5
    lags = families["grpo_weight_sync_server_lag"].samples
    assert [(s.labels["server"], s.value) for s in lags] == [("0", 1.0), ("1", 2.0)]
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert "grpo_loss_total" in families


def test_health_and_metrics_are_served(serve):
    port = serve(Health(None, {"phase": "training"}), grad_norm=0.5)
    status, text = get(port, "/healthz")
    assert (status, json.loads(text)) == (200, {"status": "ok", "phase": "training"})
    assert "grpo_grad_norm 0.5" in get(port, "/metrics")[1]
    assert get(port, "/other")[0] == 404
    # A stuck process says why.
    status, text = get(serve(Health("It waits.")), "/healthz")
    assert (status, json.loads(text)) == (503, {"status": "stuck", "problem": "It waits."})


def test_with_a_key_others_learn_only_whether_the_process_is_well(serve):
    port = serve(Health(None, {"phase": "training"}), key="secret", grad_norm=0.5)
    for wrong in ("", "wrong"):
        assert json.loads(get(port, "/healthz", wrong)[1]) == {"status": "ok"}
        assert get(port, "/metrics", wrong)[0] == 401
    assert json.loads(get(port, "/healthz", "secret")[1])["phase"] == "training"
    assert get(port, "/metrics", "secret")[0] == 200


def test_a_port_that_is_taken_is_named(serve):
    port = serve()
    with pytest.raises(MonitorError, match=rf"port {port}: .*observe\.monitor_port"):
        serve(port=port)


def test_addresses_are_written_in_the_form_that_prometheus_reads(tmp_path):
    write_address(str(tmp_path), "servers", [("10.0.0.7", 8000), ("::1", 8001)], kind="vllm")
    file = tmp_path / "monitoring/servers.json"
    (entry,) = json.loads(file.read_text())
    assert entry["targets"] == ["10.0.0.7:8000", "[::1]:8001"]
    assert entry["labels"] == {"process": "servers", "run": tmp_path.name, "kind": "vllm"}
    remove_address(str(tmp_path), "servers")
    remove_address(str(tmp_path), "servers")
    assert not file.exists()


def test_a_phase_is_stuck_after_the_bound_and_three_times_its_longest():
    now = [0.0]
    phases = Phases(stuck_seconds=10.0, clock=lambda: now[0])
    phases.enter("training")
    now[0] += 10.0
    assert phases.health({}).problem is None
    now[0] += 1.0
    problem = phases.health({}).problem
    assert problem is not None and "'training' has lasted 11 s, more than 10 s" in problem
    phases.enter("waiting")
    phases.complete(7)
    assert phases.health({}).facts["step"] == 7
    phases.enter("training")  # which has lasted 11 s before
    now[0] += 32.0
    assert phases.health({}).problem is None
    now[0] += 2.0
    assert phases.health({}).problem is not None


def test_seconds_and_shares_of_a_former_step_are_not_shown():
    monitor = RankMonitor(JobConfig(), Phases(1.0))
    kept = {"evaluation/score": 0.5, "servers/a:1/window": 4.0}
    monitor.show_step(
        kept
        | {"wall/export_seconds": 9.0, "wait/judge_seconds": 3.0, "servers/a:1/lost_fraction": 1.0}
    )
    monitor.show_step({"wall/total_seconds": 1.0})
    assert monitor.latest == kept | {"wall/total_seconds": 1.0}
