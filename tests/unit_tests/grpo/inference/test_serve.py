# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A server that is started by hand takes the model's own length, or ends with one line.

With ``--register`` it registers once it is up, and leaves when it ends.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_kinds import held_port

from torchtitan.grpo.inference.kinds import ServerSpec
from torchtitan.grpo.inference.local_servers import server_command
from torchtitan.grpo.inference.registry import RegistryFolder
from torchtitan.grpo.inference.serve import parse_arguments


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory of a model that takes 256 tokens."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    return str(tmp_path / "model")


def spec_of(kind: str, model: str, *arguments: str) -> ServerSpec:
    port = str(held_port())
    return parse_arguments([kind, model, "--python", "/env/python", "--port", port, *arguments])[0]


def error_of(capsys, *arguments: str) -> str:
    """Returns the error, which must be one line."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(list(arguments))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("kind", "option", "expected"),
    [("vllm", "--max-model-len", "auto"), ("embedded", "--max-model-len", "0")],
)
def test_the_longest_sequence_is_the_models_own(model: str, kind: str, option, expected) -> None:
    command, _ = server_command(spec_of(kind, model), {})
    assert command[command.index(option) + 1] == expected


def test_a_length_that_is_given_is_taken_up_to_the_models_own(model: str, capsys) -> None:
    command, _ = server_command(spec_of("sglang", model), {})
    assert "--context-length" not in command
    assert command[command.index("--max-total-tokens") + 1] == "32768"
    assert spec_of("vllm", model, "--max-model-len", "200").max_model_len == 200
    line = error_of(capsys, "vllm", model, "--max-model-len", "257")
    assert "--max-model-len must be at most 256" in line


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_weights_are_for_servers_that_can_serve_them(
    model: str, key: str, capsys
) -> None:
    content = json.dumps({key: {"quant_method": "fp8"}, "max_position_embeddings": 9})
    Path(model, "config.json").write_text(content, encoding="utf-8-sig")
    line = error_of(capsys, "embedded", model)
    assert (
        f"MODEL_DIR must be a model with plain weights, but {model}/config.json has {key}" in line
    )
    assert spec_of("vllm", model).kind == "vllm"


def test_a_missing_model_or_environment_and_a_key_on_the_command_line_are_named(
    tmp_path: Path, model: str, capsys, monkeypatch
) -> None:
    line = error_of(capsys, "vllm", "no/such/model")
    assert "no directory no/such/model" in line and "hf download" in line
    assert "config.json failed" in error_of(capsys, "vllm", str(tmp_path))
    port = ("--port", str(held_port()))
    line = error_of(capsys, "vllm", model, *port, "--api-key", "secret")
    assert "--api-key" in line and "environment" in line and "secret" not in line
    monkeypatch.setenv("TORCHTITAN_GRPO_VLLM_PYTHON", "/no/such/python")
    line = error_of(capsys, "vllm", model, *port)
    assert "/no/such/python does not exist" in line and "scripts/install_vllm.sh" in line


def test_a_port_that_is_taken_is_named(model: str, capsys) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        line = error_of(capsys, "embedded", model, "--port", port)
    assert f"--port {port} must be free" in line and "another port" in line


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang"])
def test_an_address_that_other_machines_reach_needs_keys(model, kind, capsys, monkeypatch) -> None:
    monkeypatch.delenv("TORCHTITAN_GRPO_API_KEY", raising=False)
    line = error_of(capsys, kind, model, "--python", "/env/python", "--host", "0.0.0.0")
    assert "--host 0.0.0.0 needs keys" in line and "TORCHTITAN_GRPO_API_KEY" in line
    monkeypatch.setenv("TORCHTITAN_GRPO_API_KEY", "secret")
    assert spec_of(kind, model, "--host", "0.0.0.0").api_key == "secret"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--register", "x", "--host", "0.0.0.0"), "--register needs --host with the address"),
        (("--register", "http://127.0.0.1:1"), "needs the run's admin key"),
        (("--register", "x", "--interface", "nothing0"), "got 'nothing0'. This host has"),
    ],
)
def test_a_registration_that_cannot_work_is_refused(
    model, capsys, monkeypatch, arguments, message
) -> None:
    for key in ("API", "ADMIN"):
        monkeypatch.delenv(f"TORCHTITAN_GRPO_{key}_KEY", raising=False)
    assert message in error_of(capsys, "embedded", model, *arguments)


def test_a_gpu_that_is_not_there_is_not_replaced_in_silence(model: str, capsys) -> None:
    port = str(held_port())
    line = error_of(capsys, "embedded", model, "--device", "cuda", "--port", port)
    assert "none is visible" in line and "--device cpu" in line
    parse_arguments(["embedded", model, "--port", port])
    assert "No GPU is visible" in capsys.readouterr().out


REPOSITORY = Path(__file__).resolve().parents[4]
MODEL = REPOSITORY / "assets/reverse_digits/model"
LIGHT = REPOSITORY / "torchtitan/grpo/system/light_start.py"
PATIENCE_SECONDS = 120.0
# Stands for the server: it answers every route.
SERVER = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@contextmanager
def serve(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    python = folder / "python"
    python.write_text(SERVER)
    python.chmod(0o755)
    command = [sys.executable, str(LIGHT), "torchtitan.grpo.inference.serve"]
    command += ["embedded", str(MODEL)]
    command += ["--device", "cpu", "--python", str(python), "--register", "registry"]
    command += ["--host", "127.0.0.1", "--port", str(held_port())]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)


@pytest.mark.parametrize("ends_itself", [False, True])
def test_a_server_is_in_the_folder_while_it_lives_and_its_status_is_passed_on(
    tmp_path: Path, ends_itself: bool
) -> None:
    folder, deadline = RegistryFolder(tmp_path / "registry"), time.monotonic() + PATIENCE_SECONDS
    with serve(tmp_path) as process:
        while not (found := folder.read()) or found[0].beat < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (one,) = found
        assert one.url.startswith("http://127.0.0.1:") and one.pid == process.pid
        if ends_itself:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM)
        assert (process.wait(timeout=30) != 0) == ends_itself
        assert folder.read() == []
