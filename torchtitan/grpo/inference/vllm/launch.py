# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

import json
import sys

from torchtitan.grpo.inference.client import MAX_TOP_TOKENS
from torchtitan.grpo.inference.server_spec import (
    LaunchCommand,
    ServerSpec,
    batched_tokens,
    seed_option,
)

WORKER_EXTENSION = "torchtitan.grpo.inference.vllm.worker_extension.WorkerExtension"
"""Class whose methods vLLM adds to its workers, for ``/collective_rpc``."""
GUARD = "torchtitan.grpo.inference.vllm.guard.VllmGuard"
"""Class that vLLM puts before its HTTP routes."""
GROUP_FACTS_METHOD = "torchtitan_grpo_group_facts"
"""Name of the worker's method that tells the facts for weight groups over NCCL."""


def launch_command(spec: ServerSpec) -> LaunchCommand:
    """Returns the command that starts one vLLM server as :class:`VLLMClient` needs it."""
    # The module, not the console script `vllm serve`, which fails in vLLM's CPU package.
    command = [spec.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", spec.model_path, "--host", spec.host, "--port", str(spec.port)]
    command += ["--dtype", spec.dtype, "--max-model-len", str(spec.max_model_len or "auto")]
    command += ["--max-num-seqs", str(spec.max_running_requests)]
    # Running requests come first in vLLM, and prompts get what is left of the budget.
    command += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(batched_tokens(spec))]
    # The route that takes and returns token ids, with the weight version of each token.
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    # A teacher returns its most likely tokens (teacher.top_k); vLLM's default limit is 20.
    command += ["--max-logprobs", str(MAX_TOP_TOKENS)]
    command += [
        "--weight-transfer-config",
        json.dumps({"backend": "torchtitan_grpo"}, allow_nan=False),
    ]
    command += ["--worker-extension-cls", WORKER_EXTENSION]
    command += ["--middleware", GUARD]
    command += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.gpu_memory_utilization is not None and spec.device == "cuda":
        command += ["--gpu-memory-utilization", f"{spec.gpu_memory_utilization:g}"]
    command += seed_option("--seed", spec)
    defaults = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if spec.device == "cpu":
        command += ["--enforce-eager"]
        # The KV cache takes 1 GiB. Threads are not pinned to cores, because vLLM would choose
        # the cores on which the trainer's threads run.
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return LaunchCommand(command, defaults, {"VLLM_API_KEY": spec.api_key})
