# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What `server_main.py` does before SGLang starts; `test_server_access.py` starts a real one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed import FileStore

from torchtitan.grpo.inference.sglang import client

VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


@pytest.fixture
def main_file() -> ModuleType:
    """The file, loaded by its path as it is run."""
    path = Path(client.__file__).with_name("server_main.py")
    spec = importlib.util.spec_from_file_location("server_main", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_an_option_that_is_given_twice_the_last_one_counts(main_file: ModuleType) -> None:
    arguments = ["--device", "cuda", "--port=1", "--device=cpu", "--last"]
    assert main_file.option(arguments, "--device") == "cpu"
    assert main_file.option(arguments, "--port") == "1"
    assert main_file.option(arguments, "--last") == ""
    assert main_file.option(arguments, "--dev") is None


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--api-key=secret", "in the server's environment"),
        ("--admin-api-key=secret", "in the server's environment"),
        ("--grpc-port=1", "without asking for keys"),
        ("--tokenizer-worker-num=2", "without asking for keys"),
    ],
)
def test_what_would_go_around_the_guard_is_refused(
    main_file: ModuleType, argument: str, words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main_file.refuse_unguarded(["--port", "1", argument])
    text = str(caught.value.code)
    assert argument.partition("=")[0] in text and words in text and "secret" not in text
    main_file.refuse_unguarded(["--port", "1"])


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is a Linux file")
def test_workers_of_one_machine_meet_in_memory(main_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    main_file.meet_in_memory(["--tp-size", "2"])
    scheme, _, path = os.environ[VARIABLE].partition("://")
    assert scheme == "file"
    store = FileStore(path, 2)
    store.set("here", "yes")
    code = f"from torch.distributed import FileStore; print(FileStore({path!r}, 2).get('here'))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert other.stdout.strip() == "b'yes'", other.stderr


@pytest.mark.parametrize("argument", ["--dist-init-addr=10.0.0.1:5000", "--nnodes=2"])
def test_workers_of_several_machines_meet_where_the_user_says(
    main_file: ModuleType, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    main_file.meet_in_memory([argument])
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "env://")
    main_file.meet_in_memory([])
    assert os.environ[VARIABLE] == "env://"


def test_sglangs_requests_to_itself_have_the_key_of_their_route(main_file: ModuleType) -> None:
    sent: list[Any] = []
    module = SimpleNamespace(
        get=lambda url, **options: sent.append((url, options["headers"])),
        post=lambda url, **options: sent.append((url, options["headers"])),
        exceptions="as they are",
    )
    keys = {"/generate": "user", "/freeze_gc": "admin", "/health": None}
    requests = main_file._KeyedRequests(module, keys.get)
    requests.get("http://h:1/health", headers={"A": "b"})
    requests.post("http://h:1/generate", timeout=1)
    requests.post("http://h:1/freeze_gc", headers={})
    assert [headers for _, headers in sent] == [
        {"A": "b"},
        {"Authorization": "Bearer user"},
        {"Authorization": "Bearer admin"},
    ]
    assert requests.exceptions == "as they are"
