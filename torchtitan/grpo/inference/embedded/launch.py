# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Command line of the embedded server."""

from torchtitan.grpo.inference.server_spec import LaunchCommand, ServerSpec, seed_option
from torchtitan.grpo.system.light_start import LIGHT_PYTHON


def launch_command(spec: ServerSpec) -> LaunchCommand:
    """Returns the command that starts one embedded server."""
    command = [spec.python or LIGHT_PYTHON[0], *LIGHT_PYTHON[1:]]
    command += ["torchtitan.grpo.inference.embedded"]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--device", spec.device, "--dtype", spec.dtype]
    command += ["--max-model-len", str(spec.max_model_len)]
    command += ["--max-running-requests", str(spec.max_running_requests)]
    command += ["--max-batched-tokens", str(spec.max_batched_tokens)]
    command += seed_option("--seed", spec)
    return LaunchCommand(command, {"HF_HUB_OFFLINE": "1"})
