# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The files for Kubernetes, SkyPilot and containers: their form, and the commands that they start."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config_checks.servers import check_inference
from torchtitan.grpo.inference.serve import parse_arguments
from torchtitan.grpo.start.node import parse as parse_node

REPOSITORY = Path(__file__).resolve().parents[2]
# podFailurePolicy is stable since the first, podReplacementPolicy since the second.
KUBERNETES_VERSIONS = ("1.31", "1.34")
MODEL = REPOSITORY / "assets/reverse_digits/model"
SCRIPTS_OF_CLUSTERS = (
    "grpo.slurm", "grpo_servers.slurm", "_slurm.sh", "serve_node.sh", "launch_multinode.sh",
    "install_launcher.sh",
)  # fmt: skip
KEYS: tuple[str, ...] = ("TORCHTITAN_GRPO_API_KEY", "TORCHTITAN_GRPO_ADMIN_KEY")
RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
"""


def _manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((REPOSITORY / "scripts/kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            yield f"{file.name}-{document['kind']}", document


MANIFESTS = dict(_manifests())


class Stage:
    """A folder in which commands run that start recorders instead of trainers and servers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, folder / "record.jsonl"
        self.data = folder / "data"
        self.data.mkdir()
        self.recorder = self._program("recorder", RECORDER.format(python=sys.executable))
        shutil.copy(REPOSITORY / "train_configs/quickstart.toml", self.data / "config.toml")
        (self.data / "model").symlink_to(MODEL)
        (folder / "bin").mkdir()
        self._program("bin/getent", "#!/bin/sh\nexit 0\n")  # as if each host had a name
        scripts = folder / "scripts"
        scripts.mkdir()
        for name in ("serve_node.sh", "launch_multinode.sh", "_env.sh"):
            shutil.copy(REPOSITORY / "scripts" / name, scripts / name)

    def _program(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def run(self, command: list[str], environment: dict[str, str]) -> list[tuple[list[str], dict]]:
        """Runs a command; returns arguments and environment of each program that it started."""
        variables = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "RECORD": str(self.record),
            "TORCHTITAN_GRPO_PYTHON": str(self.recorder),
            "TORCHTITAN_GRPO_VLLM_PYTHON": str(self.recorder),
        }
        variables |= environment
        subprocess.run(command, cwd=self.folder, env=variables, check=True, timeout=60)
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [(argv, environ) for argv, environ in map(json.loads, lines)]

    def here(self, text: str) -> str:
        return re.sub(r"/data\b", str(self.data), text)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def run_container(stage: Stage) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Runs a container's command, as the kubelet would, except that nothing is trained or served."""

    def run(container: dict[str, Any], **fields: str) -> tuple[list[str], dict[str, str]]:
        environment = dict.fromkeys(KEYS, "a-key")
        for variable in container["env"]:
            name = variable["name"]
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields.get(source, source) if source else variable["value"]
            environment[name] = stage.here(value)
        words = [*container["command"], *container["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], stage.here(w)) for w in words]
        (started,) = stage.run(words, environment)
        return started

    return run


def test_no_page_and_no_script_puts_a_key_on_a_command_line() -> None:
    files = [
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("scripts/**/*"),
        REPOSITORY / "README.md",
    ]
    for file in files:
        if file.suffix in (".md", ".sh", ".yaml", ".slurm", ".py"):
            # A shell's own words: `export`, and `echo` into a pipe.
            lines = file.read_text().splitlines()
            drawn = [line.strip() for line in lines if "openssl rand" in line]
            assert all(
                re.match(r"(# +)?(export|for name in .*; do echo) ", line) for line in drawn
            ), file
            assert "--from-literal" not in file.read_text(), file


@pytest.mark.parametrize(("launcher", "package"), [("ray", "ray"), ("sky", "skypilot")])
def test_launchers_are_installed_by_hash(launcher: str, package: str) -> None:
    assert 'locked "$1.txt"' in (REPOSITORY / "scripts/install_launcher.sh").read_text()
    text = (REPOSITORY / f"requirements/{launcher}.txt").read_text()
    packages = re.findall(
        r"^[\w.-]+(?:\[[\w,-]+\])?==\S+.*?(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert any(lines.startswith(f"{package}==") for lines in packages)
    assert all("--hash=sha256:" in lines for lines in packages)


@pytest.mark.parametrize("name", ["trainer", "servers"])
def test_base_images_can_be_named_by_digest(name: str) -> None:
    text = (REPOSITORY / f"scripts/docker/Dockerfile.{name}").read_text()
    assert re.findall(r"^FROM .*", text, re.MULTILINE) == ["FROM ${BASE}"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_the_form_that_kubernetes_demands(name: str) -> None:
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def _check_trainer(argv: list[str], environ: dict[str, str], stage: Stage, monkeypatch) -> Any:
    assert argv[2] == "torchtitan.grpo.start.node"
    for name in KEYS:
        monkeypatch.setenv(name, environ[name])
    node = parse_node(argv[3:], environ)
    config = read_config(["--job.config_file", node.config_file, *node.rest])
    monkeypatch.chdir(REPOSITORY)
    check_inference(config)
    assert config.inference.registry == environ["GRPO_REGISTRY"]
    assert config.checkpoint.enable, "a node that is replaced needs checkpoints"
    assert Path(config.job.dump_folder).parent == stage.data, "the nodes share the run's folder"
    return node


def _check_server(argv: list[str], environ: dict[str, str], monkeypatch) -> Any:
    assert argv[2] == "torchtitan.grpo.inference.serve"
    for name in KEYS:
        monkeypatch.setenv(name, environ[name])
    spec, target = parse_arguments([*argv[3:], "--device", "cpu"])
    assert target == environ["GRPO_REGISTRY"]
    assert spec.kind == environ["SERVER_KIND"]
    return spec


def test_the_job_starts_the_same_command_in_each_pod(stage, run_container, monkeypatch):
    job, service = MANIFESTS["trainer.yaml-Job"], MANIFESTS["trainer.yaml-Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    argv, environ = run_container(pod["containers"][0])
    node = _check_trainer(argv, environ, stage, monkeypatch)
    assert spec["completions"] == spec["parallelism"] == node.num_nodes[0] == node.num_nodes[1]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == node.num_ranks
    # The pod of completion index 0 holds the rendezvous, and with it rank 0.
    assert pod["subdomain"] == service["metadata"]["name"]
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert node.endpoint == (host, service["spec"]["ports"][0]["port"])
    selector = service["spec"]["selector"].items()
    assert selector <= spec["template"]["metadata"]["labels"].items()
    config = read_config(["--job.config_file", node.config_file, *node.rest])
    assert config.grpo.stop_timeout_seconds < pod["terminationGracePeriodSeconds"]


def test_each_pod_of_servers_registers_its_own_address(stage, run_container, monkeypatch):
    pod = MANIFESTS["servers.yaml-StatefulSet"]["spec"]["template"]["spec"]
    argv, environ = run_container(pod["containers"][0], **{"status.podIP": "127.0.0.1"})
    argv[argv.index("--max-running-requests") + 1] = "8"
    free_port = argv.index("--port") + 1
    port, argv[free_port] = argv[free_port], "0"
    spec = _check_server(argv, environ, monkeypatch)
    assert spec.host == "127.0.0.1"
    assert int(port) == pod["containers"][0]["ports"][0]["containerPort"]
    assert MANIFESTS["servers.yaml-Service"]["spec"]["clusterIP"] == "None", "nothing balances"


def test_each_skypilot_node_starts_what_its_rank_says(stage, monkeypatch):
    task = yaml.safe_load((REPOSITORY / "scripts/skypilot/grpo.yaml").read_text())
    nodes = ["10.0.0.1", "10.0.0.2", "127.0.0.1"]
    assert task["num_nodes"] == len(nodes)
    run = stage.here(task["run"])
    given = {name: stage.here(value) for name, value in task["envs"].items()}
    given |= dict.fromkeys(task["secrets"], "a-key") | {
        "SKYPILOT_NODE_IPS": "\n".join(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_TASK_ID": "task-1",
    }
    for rank in (1, 0):
        environment = given | {"SKYPILOT_NODE_RANK": str(rank)}
        ((argv, environ),) = stage.run(["bash", "-c", run], environment)
        node = _check_trainer(argv, environ, stage, monkeypatch)
        assert node.num_nodes == (2, 2)
        assert node.endpoint == ("10.0.0.1", 29400)
    # Rank 0's node has ended by now, which is how those of the servers know that they may.
    environment = given | {"SKYPILOT_NODE_RANK": "2", "SERVER_RESTARTS": "0"}
    text = run.replace("until [", "wait; until [")  # recorders end by themselves
    servers = stage.run(["bash", "-c", text], environment)
    assert sorted(environ["CUDA_VISIBLE_DEVICES"] for _, environ in servers) == ["0", "1"]
    for argv, environ in servers:
        environ["CUDA_VISIBLE_DEVICES"] = ""
        assert _check_server(argv, environ, monkeypatch).host == "127.0.0.1"


def lint(*command: object) -> None:
    program, *rest = command
    result = subprocess.run(
        [Path(sys.executable).with_name(str(program)), *rest],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_dockerfiles_and_scripts_of_clusters_pass_their_linters_and_name_what_exists() -> None:
    files = [REPOSITORY / "scripts" / name for name in SCRIPTS_OF_CLUSTERS]
    lint("shellcheck", "--shell=bash", "--severity=warning", *files)
    for file in (REPOSITORY / "scripts/docker").glob("Dockerfile.*[!e]"):
        lint("hadolint", "--no-color", "--failure-threshold", "warning", file)
        named = re.findall(r"scripts/[\w./]+", file.read_text().replace("$KIND", "vllm"))
        assert len(named) >= 2 and all((REPOSITORY / name).is_file() for name in named), named
        ignored = file.with_name(f"{file.name}.dockerignore").read_text().split()
        assert {".git", ".venv*", "outputs"} <= set(ignored)


@pytest.mark.long
def test_the_skypilot_task_has_the_form_that_skypilot_demands() -> None:
    python = REPOSITORY / ".venv-sky/bin/python"
    if not python.is_file():
        pytest.fail(f"{python} is not there: run bash scripts/install_launcher.sh sky first.")
    program = (
        "import sys, jsonschema, yaml\n"
        "from sky.utils import schemas\n"
        "task = yaml.safe_load(open(sys.argv[1]))\n"
        "jsonschema.validate(task, schemas.get_task_schema())\n"
        "jsonschema.validate(task['resources'], schemas.get_resources_schema())\n"
    )
    file = REPOSITORY / "scripts/skypilot/grpo.yaml"
    result = subprocess.run(
        [python, "-c", program, file], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
