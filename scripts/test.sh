#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Everything that CI runs: installs what is missing, then lint, types, fast tests, whole runs with the
# embedded server, real vLLM and real SGLang. usage: bash scripts/test.sh [--fast]
# --fast leaves out the server environments and the whole runs.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

FAST=false
case "${1-}" in
    "") ;;
    --fast) FAST=true ;;
    *) die "unknown argument $1; the only one is --fast" ;;
esac

step() {
    echo "--- $* ($(date +%T))"
}

step install
# The same tests everywhere: a GPU is not looked at.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bash scripts/install.sh --cpu
export PATH="$REPOSITORY/.venv/bin:$PATH"

step ruff
ruff check .
ruff format --check .

step pyright
pyright --pythonpath .venv/bin/python

step "fast tests"
# Two at a time: most of them wait for one process or another.
python -m pytest tests/unit_tests -q -n 2 --durations=5

if [[ "$FAST" == true ]]; then
    exit 0
fi

step "install server environments"
bash scripts/install_vllm.sh --cpu
bash scripts/install_sglang.sh --cpu

step "whole runs"
python -m pytest tests/integration_tests -q --durations=15
