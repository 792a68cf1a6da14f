# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The command line of `scripts/launch_multinode.sh`, and where a node finds itself."""

import socket

import pytest

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.start.node import find_place, launch_command, parse
from torchtitan.grpo.system.waits import Reminders

NODE = "torchtitan.grpo.start.node"
COMMAND = ["x.toml", "--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:29400"]
VARIABLES = {
    "GRPO_CONFIG": "y.toml", "NNODES": "2:4", "RDZV_ENDPOINT": "alpha:500", "NPROC_PER_NODE": "3",
    "GRPO_INTERFACE": "eth1", "MAX_RESTARTS": "5", "RDZV_ID": "job", "JOIN_TIMEOUT": "60",
}  # fmt: skip


def test_every_option_may_come_from_the_environment():
    found = parse([], VARIABLES)
    where = ("y.toml", (2, 4), ("alpha", 500))
    assert (found.config_file, found.num_nodes, found.endpoint) == where
    assert (found.num_ranks, found.interface, found.max_restarts) == (3, "eth1", 5)
    assert (found.run_id, found.join_seconds, found.rest) == ("job", 60.0, [])


def test_options_come_before_the_environment_and_settings_after_two_dashes():
    found = parse([*COMMAND, "--nproc", "1", "--", "--training.steps", "3"], VARIABLES)
    assert (found.config_file, found.num_nodes, found.num_ranks) == ("x.toml", (2, 2), 1)
    assert found.endpoint == ("10.0.0.1", 29400)
    assert parse([*COMMAND[:-1], "alpha"], {}).endpoint == ("alpha", 29400)
    assert parse([*COMMAND[:-1], "[fd00::1]:7"], {}).endpoint == ("fd00::1", 7)
    assert found.rest == ["--training.steps", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (COMMAND[1:], "A configuration must be named"),
        (["x.toml", "--rdzv-endpoint", "a:1"], "--nnodes (NNODES) must be the number of nodes"),
        ([*COMMAND, "--nnodes", "3:2"], "MIN at most MAX, got 3:2"),
        ([*COMMAND, "--rdzv-endpoint", "a:b"], "must be HOST:PORT"),
        ([*COMMAND, "--nproc", "0"], "--nproc (NPROC_PER_NODE) must be a number of at least 1"),
        ([*COMMAND, "--max-restarts", "-1"], "--max-restarts (MAX_RESTARTS) must be a number"),
    ],
)
def test_a_mistake_is_named_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments, {})
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_node_finds_itself_by_the_route_to_the_endpoint():
    place = find_place(parse(["x", "--nnodes", "1", "--rdzv-endpoint", "127.0.0.1:500"], {}))
    assert (place.interface, place.address, place.holds_store) == ("lo", "127.0.0.1", True)
    assert place.endpoint == ("127.0.0.1", 500)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rdzv-endpoint", "localhost:5"], "is 127.0.0.1 on this host, which other nodes cannot"),
        (
            ["--rdzv-endpoint", "no-such-host.invalid:5", "--join-timeout", "1"],
            r"address is known on this node, got 'no-such-host.invalid': .*, for 1 s \(--join-timeout",
        ),
        (["--interface", "nothing0", "--rdzv-endpoint", "127.0.0.1:5"], "got 'nothing0'"),
    ],
)
def test_an_endpoint_or_interface_that_leads_nowhere_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        find_place(parse(["x.toml", "--nnodes", "2", *arguments], {}))


def test_the_command_that_a_stopped_run_prints_starts_the_same_node():
    options = ["--nproc", "3", "--max-restarts", "2", "--interface", "ib0", "--rdzv-id", "second"]
    given = parse([*COMMAND, *options, "--join-timeout", "60", "--", "--a.b", "1"], {})
    words = launch_command(given).split()
    assert words[:2] == ["bash", "scripts/launch_multinode.sh"]
    assert parse([*words[2:], "--", "--a.b", "1"], {}) == given


def test_a_node_waits_for_a_name_that_is_made_later(monkeypatch, capsys):
    """As Kubernetes makes the name of a pod once the pod has started."""
    real, asked = socket.getaddrinfo, []

    def resolve(host: str, *arguments, **options):
        asked.append(host)
        if len(asked) < 8:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(f"{NODE}._RESOLVE_SECONDS", 0.05)
    monkeypatch.setattr(f"{NODE}.Reminders", lambda: Reminders(first_seconds=0.1))
    place = find_place(parse(["x", "--nnodes", "1", "--rdzv-endpoint", "run-0.run:500"], {}))
    assert place.endpoint == ("127.0.0.1", 500)
    assert asked[:8] == ["run-0.run"] * 8
    assert "(at most 900 s, --join-timeout) for the address of run-0" in capsys.readouterr().out
