#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains ten steps without a GPU, on two ranks and against a real server. Weights are pushed while requests are in
# flight. At the end, the script checks that the server serves the weights that the trainer exported.
# usage: bash scripts/verify_grpo_cpu.sh --server embedded|vllm|sglang [--model FOLDER] [--dtype float32|bfloat16]
#        [--table.key value ...]
# With assets/smollm2/model, it needs 8 GiB of memory and a few minutes.

source "$(dirname "${BASH_SOURCE[0]}")/_verify.sh"
parse_server "$@"

export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh --cpu
if [[ -f "scripts/install_$SERVER.sh" && ! -x "$SERVER_PYTHON" ]]; then
    bash "scripts/install_$SERVER.sh" --cpu
fi
PYTHON="$REPOSITORY/.venv/bin/python"
DUMP_FOLDER="outputs/verify-cpu-$SERVER-$(basename "$MODEL")"
DTYPE="${DTYPE:-float32}" TOLERANCE=1e-3
if [[ "$DTYPE" == bfloat16 ]]; then TOLERANCE="$BFLOAT16_TOLERANCE"; fi
start_server cpu
train_and_verify 2 "$TOLERANCE" "${EXTRA[@]}"
