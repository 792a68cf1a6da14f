#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Does the same as verify_grpo_cpu.sh on two GPUs: the trainer runs on the first GPU of CUDA_VISIBLE_DEVICES (or GPU
# 0), and the server on the second (or GPU 1). Weights are sent over NCCL, or, to SGLang, by the transport that
# weight_sync.transport = "auto" selects. The script has not been run yet, for lack of two GPUs.
# usage: bash scripts/verify_grpo_2gpu.sh [--server embedded|vllm|sglang] [--model FOLDER] [--dtype float32|bfloat16]
#        [--table.key value ...]

source "$(dirname "${BASH_SOURCE[0]}")/_verify.sh"
parse_server "$@"

has_gpu && (($(visible_gpus) >= 2)) || die "two GPUs are needed; with fewer, run verify_grpo_cpu.sh"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh
if [[ -f "scripts/install_$SERVER.sh" && ! -x "$SERVER_PYTHON" ]]; then
    bash "scripts/install_$SERVER.sh"
fi
PYTHON="$REPOSITORY/.venv/bin/python"
DUMP_FOLDER="outputs/verify-2gpu-$SERVER"
IFS=, read -r TRAINER_GPU SERVER_GPU _ <<<"${CUDA_VISIBLE_DEVICES:-0,1}"
# The kernels of the trainer and of the server differ, so the bound is wider than on a CPU.
TOLERANCE=2e-2 TRANSPORT=nccl
if [[ "$SERVER" == sglang ]]; then
    # SGLang's default attention on GPUs refuses float32.
    DTYPE="${DTYPE:-bfloat16}"
    # SGLang has a torch of its own, and does not report its version of NCCL.
    TRANSPORT=auto
fi
DTYPE="${DTYPE:-float32}"
if [[ "$DTYPE" == bfloat16 ]]; then TOLERANCE="$BFLOAT16_TOLERANCE"; fi
CUDA_VISIBLE_DEVICES="$SERVER_GPU" start_server cuda
CUDA_VISIBLE_DEVICES="$TRAINER_GPU" train_and_verify 1 "$TOLERANCE" --weight_sync.transport "$TRANSPORT" "${EXTRA[@]}"
