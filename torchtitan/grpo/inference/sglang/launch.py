# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import sys
from pathlib import Path

from torchtitan.grpo.inference.server_spec import (
    LaunchCommand,
    ServerSpec,
    batched_tokens,
    seed_option,
)

_SERVER_MAIN = Path(__file__).with_name("server_main.py")
# On a CPU, SGLang would otherwise allocate 15 GB for its KV cache.
_CPU_MAX_TOKENS = 32768


def launch_command(spec: ServerSpec) -> LaunchCommand:
    """Returns the command that starts an SGLang server behind the guard of `server_main.py`."""
    command = [spec.python or sys.executable, str(_SERVER_MAIN)]
    if spec.device == "cpu":
        # An idle scheduler would otherwise ask for requests in a loop, which takes a whole core.
        command += ["--attention-backend", "torch_native", "--sleep-on-idle"]
        wanted = spec.max_running_requests * spec.max_model_len or _CPU_MAX_TOKENS
        max_tokens = max(spec.max_model_len, min(wanted, _CPU_MAX_TOKENS))
        command += ["--max-total-tokens", str(max_tokens)]
    command += ["--model-path", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--device", spec.device, "--dtype", spec.dtype]
    command += ["--context-length", str(spec.max_model_len)] if spec.max_model_len else []
    command += ["--max-running-requests", str(spec.max_running_requests)]
    # SGLang does not mix prompts and running requests in one batch when logprobs are asked for, so
    # its option --enable-mixed-chunk would do nothing here. The interval makes running requests
    # wait for one chunk of a prompt, and not for all of its chunks.
    command += ["--chunked-prefill-size", str(batched_tokens(spec))]
    command += ["--prefill-decode-interval", "1"]
    command += ["--tp-size", str(spec.tensor_parallel_size)]
    if spec.gpu_memory_utilization is not None and spec.device == "cuda":
        command += ["--mem-fraction-static", f"{spec.gpu_memory_utilization:g}"]
    command += seed_option("--random-seed", spec)
    return LaunchCommand(command, {"HF_HUB_OFFLINE": "1"})
