"""Each mistake of a user gives one clear message and a non-zero exit status, and leaves no process."""

import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

SMALL = (
    "--grpo.prompts_per_step=2", "--evaluation.num_prompts=4", "--training.steps=3",
    "--rollout.max_head_offpolicyness=0",
)  # fmt: skip
# Found wrong before a server is needed: none is started, and none is there.
NO_SERVER = ("--inference.no-launch", "--inference.urls", "http://127.0.0.1:9")
WEIGHTS = "model.safetensors"


def _expect(runs: dict[str, tuple[Any, list[str]]]) -> None:
    """Checks that each run fails with one message that contains all its parts.

    The runs are started together, since most of the time they wait for each other's end.
    """
    for run, _ in runs.values():
        run.start()
    for name, (run, parts) in runs.items():
        message = run.fail()
        print(f"{name}: {message}")
        for part in parts:
            assert part in message, f"{name}: {message}"


def test_a_bad_configuration_file_is_refused_by_key(make_run, repository, tmp_path):
    text = (repository / "train_configs/quickstart.toml").read_text()
    cases = {
        "misspelt": ("groupsize = 8", ["Unknown key grpo.groupsize", "grpo.group_size"]),
        "wrong_type": ('group_size = "eight"', ["grpo.group_size", "int"]),
    }
    runs = {}
    for name, (line, parts) in cases.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(text.replace("group_size = 8", line))
        runs[name] = (make_run(config=file, name=name, torchrun=name == "misspelt"), parts)
    _expect(runs)


def _no_directory(model: Path) -> None:
    shutil.rmtree(model)


def _other_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


def _no_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()


def _truncated_weights(model: Path) -> None:
    content = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(content[: len(content) // 2])


def _missing_tensor(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, model / WEIGHTS)


def test_a_model_that_cannot_be_used_is_refused(make_run, repository, tmp_path):
    cases = {
        _no_directory: ["model.hf_assets_path", "config.json"],
        _other_architecture: ["MambaForCausalLM", "Qwen3ForCausalLM"],
        _no_weights: ["model.hf_assets_path", "*.safetensors"],
        _truncated_weights: ["model.hf_assets_path", WEIGHTS],
        _missing_tensor: ["model.hf_assets_path", "lack the tensor model.norm.weight"],
    }
    runs = {}
    for break_model, parts in cases.items():
        name = break_model.__name__
        model = tmp_path / "models" / name
        shutil.copytree(repository / "assets/reverse_digits/model", model)
        break_model(model)
        # All ranks read the weights, and all find them wrong.
        num_ranks = 2 if break_model is _missing_tensor else 1
        run = make_run(f"--model.hf_assets_path={model}", name=name, num_ranks=num_ranks)
        runs[name] = (run, [str(model), *parts])
    _expect(runs)


def test_prompts_that_cannot_be_used_are_refused(make_run, tmp_path):
    cases = {
        "empty": ("", ["prompts.path"]),
        "broken_line": ('{"prompt": "1", "answer": "1"}\n{"prompt": ', ["2"]),
        "no_such_column": ('{"question": "1", "answer": "1"}\n', ["prompts.column", "question"]),
    }
    runs = {}
    for name, (content, parts) in cases.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(content)
        run = make_run(*NO_SERVER, f"--prompts.path={file}", name=name, num_ranks=1)
        runs[name] = (run, [str(file), *parts])
    _expect(runs)


REWARDS = """
import time

def too_few(completions):
    return [0.0] * (len(completions) - 1)

def not_a_number(completions):
    return [float("nan")] * len(completions)

def hangs(completions):
    time.sleep(1000)

def hangs_later(completions):
    if completions != [""]:
        time.sleep(1000)
    return [0.0]
"""


def test_a_reward_that_cannot_be_used_is_refused(make_run, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    cases = {
        "no_such_package.rewards:score": ["no_such_package"],
        f"{file}:missing": ["has no 'missing'", "too_few"],
        f"{file}:too_few": ["too_few", "one number for each of 1 completions, got 0"],
        f"{file}:not_a_number": ["not_a_number", "nan"],
        f"{file}:hangs": ["rewards.py:hangs", "reward.timeout_seconds = 15"],
    }
    runs = {}
    for function, parts in cases.items():
        name = function.rsplit(":")[-1]
        arguments = ("--reward.functions", function, "--reward.timeout_seconds=15")
        runs[name] = (make_run(*NO_SERVER, *arguments, name=name, num_ranks=1), parts)
    _expect(runs)


def test_a_reward_that_hangs_during_training_ends_the_run(make_run, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    message = make_run(
        *SMALL, "--reward.functions", f"{file}:hangs_later", "--reward.timeout_seconds=10",
        "--reward.max_consecutive_failures=2",
    ).fail()  # fmt: skip
    assert "reward.max_consecutive_failures" in message
    assert "reward.timeout_seconds = 10" in message


@pytest.fixture
def other_server() -> Iterator[str]:
    """URL of an HTTP server that is not an inference server and answers every request with 200."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="other-server", daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _of_another(url: str) -> tuple[str, ...]:
    return (
        *("--inference.no-launch", "--inference.urls", url),
        *("--inference.startup_timeout_seconds=3", "--weight_sync.timeout_seconds=3"),
    )


def test_a_url_that_is_not_an_inference_server_is_reported(make_run, other_server):
    unused = "http://127.0.0.1:9"  # the port of the service "discard", on which nothing listens
    _expect(
        {
            "unused": (
                make_run(*SMALL, *_of_another(unused), name="unused"),
                [unused, "inference.startup_timeout_seconds"],
            ),
            # It shows what was answered.
            "other": (
                make_run(*SMALL, *_of_another(other_server), name="other"),
                [other_server, "welcome"],
            ),
        }
    )
