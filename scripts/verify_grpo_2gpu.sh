#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# With two GPUs: the trainer on the first of CUDA_VISIBLE_DEVICES (or GPU 0), the server on the second (or
# GPU 1), weights over NCCL (SGLang: what weight_sync.transport = "auto" takes). Otherwise as verify_grpo_cpu.sh. It has not been run yet, for lack of two GPUs.
# usage: bash scripts/verify_grpo_2gpu.sh [--server embedded|vllm|sglang] [--table.key value ...]

source "$(dirname "${BASH_SOURCE[0]}")/_verify.sh"
parse_server "$@"

has_gpu && (($(visible_gpus) >= 2)) || die "two GPUs are needed; on fewer run verify_grpo_cpu.sh"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh
if [[ -f "scripts/install_$SERVER.sh" && ! -x "$SERVER_PYTHON" ]]; then
    bash "scripts/install_$SERVER.sh"
fi
PYTHON="$REPOSITORY/.venv/bin/python"
DUMP_FOLDER="outputs/verify-2gpu-$SERVER"
IFS=, read -r TRAINER_GPU SERVER_GPU _ <<<"${CUDA_VISIBLE_DEVICES:-0,1}"
# Kernels differ between trainer and server, so the bound is wider than on CPU.
DTYPE=float32 TOLERANCE=2e-2 TRANSPORT=nccl
if [[ "$SERVER" == sglang ]]; then
    # Its default attention on GPUs refuses float32. bfloat16 alone moves this model's logprobs by 0.04.
    DTYPE=bfloat16 TOLERANCE=1.5e-1
    # SGLang brings a torch of its own and does not tell its version of NCCL.
    TRANSPORT=auto
fi
CUDA_VISIBLE_DEVICES="$SERVER_GPU" start_server cuda "$DTYPE"
CUDA_VISIBLE_DEVICES="$TRAINER_GPU" train_and_verify 1 "$TOLERANCE" --weight_sync.transport "$TRANSPORT" "${EXTRA[@]}"
