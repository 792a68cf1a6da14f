# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Launched servers and the rollout process see everything but the keys of others, and no rank."""

import pytest

from torchtitan.grpo import config as tables
from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.child_process import child_environment
from torchtitan.grpo.system.environment import without_keys
from torchtitan.grpo.types import PromptProgress

words = str.split
KEYS = words(
    "WANDB_API_KEY WANDB_ENTITY AWS_PROFILE AWS_WEB_IDENTITY_TOKEN_FILE AZURE_CLIENT_ID GITHUB_TOKEN "
    "GOOGLE_APPLICATION_CREDENTIALS GH_PAT OPENAI_API_KEY OPENAI_APIKEY SSH_AUTH_SOCK SLURM_JWT "
    "PGPASSWORD MYSQL_PWD DB_PASS REDISCLI_AUTH VAULT_SECRET_ID SENTRY_DSN SLACK_WEBHOOK_URL KEY_2 "
    "my_api_key API_KEYS VLLM_API_KEY RAY_AUTH_TOKEN SGLANG_S3_ACCESS_KEY_ID HF_TOKEN HF_TOKEN_PATH "
    "HUGGING_FACE_HUB_TOKEN TORCHTITAN_GRPO_MONITOR_KEY"
)
OF_RANK = words("RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR GROUP_RANK TORCHELASTIC_RUN_ID")
VALUES = {
    "DATABASE_URL": "postgres://me:secret@host/db",
    "PIP_INDEX_URL": "https://secret@host/simple",
    "DEPLOY": "-----BEGIN OPENSSH PRIVATE KEY-----",
}
NEEDED = dict.fromkeys(
    words(
        "PATH HOME PWD OLDPWD OMP_NUM_THREADS CUDA_VISIBLE_DEVICES HF_HOME NCCL_DEBUG FI_PROVIDER "
        "OFI_NCCL_PROTOCOL LMOD_CMD ROCR_VISIBLE_DEVICES NVSHMEM_IB_GID_INDEX SLURM_JOB_ID PMIX_RANK "
        "OMPI_COMM_WORLD_RANK RAY_ADDRESS KRB5CCNAME SCRATCH LMCACHE_CONFIG_FILE TRITON_CACHE_DIR "
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_USE_FASTOKENS SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG "
        "SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK TOKENIZERS_PARALLELISM SSL_CERT_FILE NO_PROXY"
    ),
    "x",
) | {"https_proxy": "http://me:secret@proxy:3128", "VLLM_HOST_URL": "tcp://10.0.0.1:5000"}
ALL = dict.fromkeys((*KEYS, *OF_RANK), "x") | VALUES | NEEDED


def test_a_child_sees_what_it_needs_and_no_key_but_its_own() -> None:
    assert without_keys(ALL) == NEEDED
    assert without_keys(ALL, ["VLLM_API_KEY"]) == NEEDED | {"VLLM_API_KEY": "x"}
    assert without_keys(ALL, ["HF_TOKEN*"]).keys() - NEEDED.keys() == {"HF_TOKEN", "HF_TOKEN_PATH"}


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        (None, set()),
        ("hub", {"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"}),
        ("passed", {"OPENAI_API_KEY", "OPENAI_APIKEY"}),
        ("monitor", {"TORCHTITAN_GRPO_MONITOR_KEY"}),
    ],
)
def test_the_rollout_process_sees_the_keys_that_it_uses(setting, seen, tmp_path):
    config = RolloutProcessConfig(
        tables.GRPO(), tables.Prompts(path="openai/gsm8k" if setting == "hub" else str(tmp_path)),
        tables.Rollout(), tables.Inference(), tables.Reward(), tables.Evaluation(), "model", 97, [1],
        64, 0, str(tmp_path), [], 0, PromptProgress(),
        workers=tables.Workers(["OPENAI_*"] if setting == "passed" else []),
        monitor_host="127.0.0.1" if setting == "monitor" else "",
    )  # fmt: skip
    found = child_environment(config, ALL)
    assert found.keys() - NEEDED.keys() == seen | {"TORCHTITAN_GRPO_RUN"}
