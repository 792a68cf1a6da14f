#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Without a GPU: trains ten steps on two ranks against a real server, pushes weights while requests are in
# flight, and checks that what the server serves is what the trainer exported.
# usage: bash scripts/verify_grpo_cpu.sh --server embedded|vllm|sglang [--model FOLDER] [--table.key value ...]
# The model must have the tokenizer of assets/reverse_digits/model, with whose prompts it is trained.

source "$(dirname "${BASH_SOURCE[0]}")/_verify.sh"
parse_server "$@"

export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh --cpu
if [[ -f "scripts/install_$SERVER.sh" && ! -x "$SERVER_PYTHON" ]]; then
    bash "scripts/install_$SERVER.sh" --cpu
fi
PYTHON="$REPOSITORY/.venv/bin/python"
DUMP_FOLDER="outputs/verify-cpu-$SERVER-$(basename "$MODEL")"
start_server cpu float32
train_and_verify 2 1e-3 "${EXTRA[@]}"
