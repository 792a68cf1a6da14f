# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whatever the package opens as data, configuration or weights is a regular file."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from torchtitan.grpo.commands import verify
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import check_file
from torchtitan.grpo.data.ptx import PtxStream
from torchtitan.grpo.data.record import RecordReader, RolloutRecorder
from torchtitan.grpo.inference import serve
from torchtitan.grpo.inference.embedded.model import load_model
from torchtitan.grpo.inference.registry import Registration, RegistryFolder
from torchtitan.grpo.inference.urls import named_urls, read_urls
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.models.hub import locate_model
from torchtitan.grpo.rollout.saved import read_saved
from torchtitan.grpo.rollout.tables import open_table
from torchtitan.grpo.system import files
from torchtitan.grpo.system.files import (
    NotRegularError,
    check_folder,
    check_regular,
    open_regular,
    read_regular,
)
from torchtitan.grpo.system.functions import load_function

MODEL = Path(__file__).parents[4] / "assets" / "reverse_digits" / "model"


@pytest.fixture(autouse=True)
def no_open_waits() -> Iterator[None]:
    """Fails a test that waits for a writer of a pipe, or reads without end."""

    def stop(*_: object) -> None:
        raise AssertionError("it waited for a pipe, or read without end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@contextmanager
def in_place_of(path: Path, kind: str) -> Iterator[Path]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            here = Path.cwd()
            os.chdir(path.parent)  # the path of a socket is short
            listener.bind(path.name)
            os.chdir(here)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(kind)
        yield path


KINDS = ["pipe", "socket", "directory", "/dev/zero", "/dev/null", "/proc/kmsg", "/proc/self/mem"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    with in_place_of(tmp_path / "file", kind) as file:
        for use in (check_regular, open_regular, read_regular):
            with pytest.raises(NotRegularError, match="file: it must be a regular file, but it is"):
                use(file)


@pytest.mark.parametrize("kind", ["pipe", "directory", "/dev/zero"])
def test_a_file_that_is_replaced_after_the_check_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "check_regular", lambda path: None)  # the file was there until then
    refused = pytest.raises(NotRegularError, match="file: it must be a regular file, but it is")
    with in_place_of(tmp_path / "file", kind) as file, refused:
        open_regular(file)


def test_process_substitution_is_refused_and_redirection_is_not(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with pytest.raises(NotRegularError, match=r"process substitution.*Write the content to a file"):
        open_regular(f"/dev/fd/{reads}")
    os.close(reads), os.close(writes)
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        assert read_regular(f"/dev/fd/{file.fileno()}") == b"content"


def test_a_regular_file_is_read_also_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    assert read_regular(tmp_path / "link") == b"content"
    check_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "broken")


def ptx(file: Path) -> None:
    config = JobConfig()
    config.grpo.ptx_path = str(file)
    PtxStream(config, read_hf_model(MODEL))


def urls_setting(file: Path) -> None:
    config = JobConfig()
    config.inference.urls_file = str(file)
    named_urls(config.inference)


def table(file: Path) -> None:
    open_table(str(file), "train", {}, "prompt", "prompts.path")


FILES: dict[str, Callable[[Path], object]] = {
    "toml": lambda file: read_config([f"--job.config_file={file}"]),
    "setting": lambda file: check_file("inference.urls_file", str(file)),
    "urls": read_urls,
    "urls_setting": urls_setting,
    "reward.py": lambda file: load_function(f"{file}:score", "reward.functions", []),
    "jsonl.jsonl": table,
    "parquet.parquet": table,
    "ptx": ptx,
    "replay": lambda file: list(RecordReader(str(file), 97, 1.0, "rollout.replay")),
    "record": lambda file: RolloutRecorder(str(file), 97, 1.0, 0),
    "saved": lambda file: read_saved(file, 3),
    "prompts_of_verify": lambda file: verify.read_prompts(file, 1),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_setting_must_be_regular(name: str, tmp_path: Path) -> None:
    with (
        in_place_of(tmp_path / name, "pipe"),
        pytest.raises((ValueError, ConfigError, OSError), match="regular file"),
    ):
        FILES[name](tmp_path / name)


MODELS: dict[str, Callable[[str], object]] = {
    "train": lambda folder: locate_model(folder, "model.hf_assets_path"),
    "read": read_hf_model,
    "serve": serve.model_config,
    "embedded": lambda folder: load_model(folder, "cpu", "float32"),
}
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors", "model.safetensors.index.json", "chat_template.jinja",
)  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "name"),
    [*(("train", name) for name in MODEL_FILES), *((reader, "config.json") for reader in MODELS)],
)
def test_every_file_of_a_model_must_be_regular(reader: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    with (
        in_place_of(folder / name, "pipe"),
        pytest.raises((ValueError, ConfigError, OSError), match=rf"{name}: it must be a regular"),
    ):
        MODELS[reader](str(folder))


def test_a_folder_of_data_is_looked_at_in_all_its_folders(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "a.jsonl").write_text('{"prompt": "a"}\n')
    with (
        in_place_of(tmp_path / "data" / "train" / "b.jsonl", "pipe"),
        pytest.raises(ValueError, match=r"prompts\.path: .*b\.jsonl: it must be a regular file"),
    ):
        table(tmp_path / "data")


def test_what_is_no_file_registers_no_server(tmp_path: Path) -> None:
    folder = RegistryFolder(tmp_path)
    one = Registration("http://127.0.0.1:8000", "embedded", "host", 1, 1.0)
    folder.write(one)
    (tmp_path / "good.txt").write_text(json.dumps(asdict(one)))
    for i, kind in enumerate(KINDS):
        with in_place_of(tmp_path / f"{i}.json", kind):
            assert folder.read() == [one]
