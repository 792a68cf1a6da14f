#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# With two GPUs: the trainer on the first, the server on the second, weights over NCCL. Otherwise as
# verify_grpo_cpu.sh. usage: bash scripts/verify_grpo_2gpu.sh [--server embedded|vllm|sglang]

source "$(dirname "${BASH_SOURCE[0]}")/_verify.sh"
parse_server "$@"

has_gpu && (($(visible_gpus) >= 2)) || die "two GPUs are needed; on fewer run verify_grpo_cpu.sh"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh
if [[ "$SERVER" != embedded && ! -x "$SERVER_PYTHON" ]]; then
    bash "scripts/install_$SERVER.sh"
fi
PYTHON="$REPOSITORY/.venv/bin/python"
DUMP_FOLDER="outputs/verify-2gpu-$SERVER"
CUDA_VISIBLE_DEVICES=1 start_server cuda float32
# Kernels differ between trainer and server, so the bound is wider than on CPU.
CUDA_VISIBLE_DEVICES=0 train_and_verify 1 2e-2 --weight_sync.backend nccl "${EXTRA[@]}"
