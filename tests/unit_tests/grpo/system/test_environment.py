# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Which variables the children of a run see, and which they do not."""

import pytest

from torchtitan.grpo.system.environment import PROGRAM, passed, rollout_environment
from torchtitan.grpo.system.environment import server_environment as of_server

OTHERS_KEYS = (
    "WANDB_API_KEY",
    "WANDB_ENTITY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GITHUB_TOKEN",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "SSH_AUTH_SOCK",
    "DATABASE_URL",
    "MY_PASSWORD",
    "VLLM_API_KEY",
    "NVIDIA_API_KEY",
    "RAY_AUTH_TOKEN",
    "SGLANG_ADMIN_KEY",
    "TORCHTITAN_GRPO_MONITOR_KEY",
)
HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
NEEDED = (
    "PATH",
    "HOME",
    "LC_ALL",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "TORCH_LOGS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_MAX_TOKENS_PER_EXPERT_FUSED_MOE",
    "SGLANG_ENABLE_TORCH_INFERENCE_MODE",
    "LD_LIBRARY_PATH",
    "HF_HOME",
    "TRITON_CACHE_DIR",
)
ALL = dict.fromkeys((*OTHERS_KEYS, *HUB, *OF_RANK, *NEEDED, "https_proxy", "MINE"), "x")


@pytest.mark.parametrize("name", (*OTHERS_KEYS, *HUB, *OF_RANK))
def test_no_child_sees_the_keys_of_others_nor_the_rank(name: str) -> None:
    children = (
        of_server(ALL, ["TORCHTITAN_GRPO_API_KEY"]),
        rollout_environment(ALL, [], uses_hub=False),
        passed(ALL, PROGRAM),
    )
    assert not any(name in child for child in children)


@pytest.mark.parametrize("name", NEEDED)
def test_servers_and_the_rollout_process_see_what_computing_needs(name: str) -> None:
    assert name in of_server(ALL, []) and name in rollout_environment(ALL, [], uses_hub=False)


def test_a_key_is_seen_by_its_owner_alone() -> None:
    assert "VLLM_API_KEY" in of_server(ALL, ["VLLM_API_KEY"])
    assert "HF_TOKEN" in rollout_environment(ALL, [], uses_hub=True)
    assert "MINE" in rollout_environment(ALL, ["MINE"], uses_hub=False)
    assert "https_proxy" in rollout_environment(ALL, [], uses_hub=False)
    assert "https_proxy" not in of_server(ALL, [])
