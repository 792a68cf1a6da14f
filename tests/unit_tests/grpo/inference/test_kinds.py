# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The table of server kinds: each row is complete, and reading the table costs little."""

import subprocess
from pathlib import Path

import pytest
from light import LIGHT

from torchtitan.grpo.inference import kinds
from torchtitan.grpo.inference.client import InferenceClient
from torchtitan.grpo.inference.kinds import KINDS, kind_row, refuse_keys
from torchtitan.grpo.inference.server_spec import LaunchCommand, ServerSpec
from torchtitan.grpo.system.light_start import LIGHT_PYTHON

FOLDER = Path(kinds.__file__).parent
REPOSITORY = FOLDER.parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_names_a_client_and_a_launcher_of_its_own_folder(kind: str) -> None:
    row = KINDS[kind]
    assert row.name == kind
    package = f"torchtitan.grpo.inference.{kind}."
    assert row.client.startswith(package)
    assert row.launcher.startswith(package)
    client = row.load_client()
    assert isinstance(client, type)
    assert issubclass(client, InferenceClient)
    assert not client.__abstractmethods__
    spec = ServerSpec(kind, "/models/tiny", 4321, "cpu", "float32", 256, 16, python="python")
    assert isinstance(row.launch_command(spec), LaunchCommand)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_with_an_environment_has_a_script_that_installs_it(kind: str) -> None:
    script = KINDS[kind].install_script
    if script is not None:
        assert (REPOSITORY / script).is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_line_of_a_server_holds_a_key(kind: str) -> None:
    spec = ServerSpec(
        kind, "/models/tiny", 4321, "cpu", "float32", 256, 16, api_key="secret", admin_key="secret"
    )
    assert "secret" not in " ".join(KINDS[kind].launch_command(spec).arguments)
    for option in KINDS[kind].key_options:
        for arguments in ([option, "secret"], [f"{option}=secret"]):
            with pytest.raises(
                ValueError, match=f"(?s)got {option}.*TORCHTITAN_GRPO_API_KEY"
            ) as caught:
                refuse_keys(kind, arguments, "inference.extra_args")
            assert "secret" not in str(caught.value)
    refuse_keys(kind, ["--seed", "7"], "inference.extra_args")


def test_every_folder_of_a_kind_has_a_row() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/client.py")} == set(KINDS)


def test_an_unknown_kind_is_refused_with_the_list_of_kinds() -> None:
    with pytest.raises(ValueError, match=r"inference\.kind must be one of .*embedded, .*got 'tgi'"):
        kind_row("tgi")


def test_the_table_is_read_without_torch_or_an_http_client() -> None:
    # `import torchtitan` would import torch; the launcher puts a bare package in its place.
    code = (
        f"{LIGHT}import sys, torchtitan.grpo.inference.kinds;"
        "print({'torch', 'aiohttp', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [LIGHT_PYTHON[0], "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "set()"
