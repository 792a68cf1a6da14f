# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts and ends a rollout process, or the process that checks its inputs."""

import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.config.environments import environments_of
from torchtitan.grpo.config.evaluation import evaluation_sets
from torchtitan.grpo.inference.access import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    TEACHER_KEY_VARIABLE,
)
from torchtitan.grpo.system.child import end_marked, start_child, stop_children
from torchtitan.grpo.system.environment import RUN_VARIABLE, without_keys
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.system.monitoring.addresses import KEY_VARIABLE


def start_process(
    module: str, folder: Path, config: RolloutProcessConfig, log_file: Path
) -> tuple[subprocess.Popen, str]:
    """Runs a module in a new process, with ``folder`` as argument.

    Returns the process and the value of its variable ``RUN_VARIABLE``. All its descendants inherit the
    variable, by which :func:`end_process` finds them.
    """
    environ = child_environment(config, os.environ)
    command = [*LIGHT_PYTHON, module, str(folder)]
    return start_child(command, env=environ, log_file=log_file), environ[RUN_VARIABLE]


def end_process(child: subprocess.Popen, mark: str, grace_seconds: float = 3.0) -> None:
    """Ends ``child``, and all processes with the ``RUN_VARIABLE`` ``mark`` that it has left running."""
    stop_children([child], grace_seconds)
    end_marked(mark)


def child_environment(config: RolloutProcessConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of ``environ`` that the process may see, and a new ``RUN_VARIABLE``."""
    own = [API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, *config.workers.pass_variables]
    own += [TEACHER_KEY_VARIABLE] if config.teacher.urls else []
    own += [KEY_VARIABLE] if config.monitor_host else []
    sources = [one.prompts.path for one in environments_of(config).values()]
    sources += config.prompts.paths
    sources += [one.path for one in evaluation_sets(config.evaluation).values()]
    if any(source and not Path(source).exists() for source in sources):
        own += ["HF_TOKEN*", "HUGGING_FACE_HUB_TOKEN"]  # a data set of the Hub
    return without_keys(environ, own) | {RUN_VARIABLE: uuid.uuid4().hex}
