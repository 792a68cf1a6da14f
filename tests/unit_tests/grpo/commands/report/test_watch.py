# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A report that is served while the run goes on, and one of several runs."""

import base64
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_run import make_run

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.report.command import Server
from torchtitan.grpo.commands.report.content import Run
from torchtitan.grpo.system.errors import RunError


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    make_run(tmp_path, 5, groups=1, size=2)
    with Server([Run(tmp_path)], (0, 1 << 60), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield tmp_path, server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    skip = "Host" in headers
    connection.putrequest("GET", path, skip_host=skip)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, response.read(), response.headers["ETag"]


def steps_of(body: bytes) -> int:
    (run,) = json.loads(body)
    return json.loads(gzip.decompress(base64.b64decode(run["core"])))["header"]["steps"]


def test_new_records_are_served_and_old_content_is_not_sent_again(watched):
    folder, server = watched
    status, body, _ = ask(server, server.path)
    assert status == 200 and b"connect-src 'self'" in body and b'data-watch="5.0"' in body
    status, body, tag = ask(server, f"{server.path}data")
    assert status == 200 and steps_of(body) == 5
    assert ask(server, f"{server.path}data", If_None_Match=tag)[:2] == (304, b"")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "reward/mean": 1.0}\n{"step": 7')
    status, body, _ = ask(server, f"{server.path}data", If_None_Match=tag)
    assert status == 200 and steps_of(body) == 6


def test_nobody_is_served_without_the_path_or_by_another_name(watched):
    _, server = watched
    assert server.url.startswith("http://127.0.0.1:") and len(server.path) > 30
    assert server.server_address[0] == "127.0.0.1"
    for path in (
        "/",
        "/data",
        f"{server.path}../x",
        f"{server.path}x",
        "/%C3%A4",
    ):
        assert ask(server, path)[0] == 403
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
        assert ask(server, server.path, Host=host)[0] == 403
        assert ask(server, f"{server.path}data", Host=host)[0] == 403
    assert ask(server, server.path, Host=f"localhost:{server.server_port}")[0] == 200


def test_a_page_of_two_runs_holds_both_within_one_budget(tmp_path, capsys):
    one = make_run(tmp_path / "one", 5, groups=1, size=2)
    two = make_run(tmp_path / "two", 5, groups=1, size=2)
    file = tmp_path / "both.html"
    assert cli.run(["report", str(one), str(two), "-o", str(file)]) == 0
    page = file.read_text()
    assert all(
        f'id="{name}-{i}"' in page for name in ("core", "samples", "evaluations") for i in (0, 1)
    )
    assert "{{" not in page and page.count("http-equiv") == 1 and "connect-src 'none'" in page
    assert str(file) in capsys.readouterr().out
    assert cli.run(["report", str(one), str(two), "--json"]) == 0
    assert [run["header"]["name"] for run in json.loads(capsys.readouterr().out)] == ["one", "two"]


def test_a_taken_port_is_refused_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"--port must be free on 127.0.0.1, but {port} is not"):
            Server([], (0, 1), port)
