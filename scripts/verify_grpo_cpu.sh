#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains ten steps without a GPU, on two ranks and against a real server. Weights are pushed while requests are in
# flight. At the end, the script checks that the server serves the weights that the trainer exported.
# usage: bash scripts/verify_grpo_cpu.sh --server embedded|vllm|sglang [--model FOLDER] [--table.key value ...]
# The model must have the tokenizer of assets/reverse_digits/model, because it is trained on that model's prompts.

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
