"""A mistake of a user gives one clear message and a non-zero exit status, and leaves no process.

What else may be wrong, and what is said then, is tested where it is found.
"""

import http.server
import shutil
import threading
from collections.abc import Iterator

import pytest
from safetensors.torch import load_file, save_file

SMALL = (
    "--grpo.prompts_per_step=2", "--evaluation.num_prompts=4", "--training.steps=3",
    "--rollout.max_head_offpolicyness=0",
)  # fmt: skip
REWARDS = """
import time

def too_few(completions):
    return [0.0] * (len(completions) - 1)

def hangs_later(completions):
    if completions != [""]:
        time.sleep(1000)
    return [0.0]
"""


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


def test_each_mistake_is_one_message_that_names_its_place(
    make_run, repository, tmp_path, other_server
):
    configuration = tmp_path / "misspelt.toml"
    text = (repository / "train_configs/quickstart.toml").read_text()
    configuration.write_text(text.replace("group_size = 8", "groupsize = 8"))
    model = tmp_path / "model"
    shutil.copytree(repository / "assets/reverse_digits/model", model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors")
    rewards, prompts = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    rewards.write_text(REWARDS)
    prompts.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": ')
    # Found wrong before a server is needed: none is started, and none is there.
    unused = ("--inference.no-launch", "--inference.urls", "http://127.0.0.1:9")
    soon = ("--inference.startup_timeout_seconds=3", "--weight_sync.timeout_seconds=3")
    cases = [
        (
            make_run(config=configuration, name="misspelt"),
            ["Unknown key grpo.groupsize", "grpo.group_size"],
        ),
        (  # All ranks read the weights, and all find them wrong.
            make_run(f"--model.hf_assets_path={model}", name="weights"),
            [str(model), "model.hf_assets_path", "lack the tensor model.norm.weight"],
        ),
        (
            make_run(*unused, f"--prompts.path={prompts}", name="prompts", num_ranks=1),
            [str(prompts), "2"],
        ),
        (
            make_run(*unused, f"--reward.functions={rewards}:too_few", name="few", num_ranks=1),
            ["too_few", "one number for each of 1 completions, got 0"],
        ),
        (
            make_run(
                *SMALL, f"--reward.functions={rewards}:hangs_later", "--reward.timeout_seconds=5",
                "--reward.max_consecutive_failures=2", name="hangs",
            ),
            ["reward.max_consecutive_failures", "reward.timeout_seconds = 5"],
        ),
        (
            make_run(*SMALL, *unused, *soon, name="unused"),
            [unused[-1], "inference.startup_timeout_seconds"],
        ),
        (  # It shows what was answered.
            make_run(*SMALL, *unused[:2], other_server, name="other"),
            [other_server, "welcome"],
        ),
    ]  # fmt: skip
    # Started together, since most of the time they wait for each other's end.
    for run, _ in cases:
        run.start()
    for run, parts in cases:
        message = run.fail()
        for part in parts:
            assert part in message, f"{run.folder.name}: {message}"
