#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv, the trainer's environment. usage: bash scripts/install.sh [--cpu]
# A .venv that was created for GPUs is kept with --cpu: the CUDA build of torch also computes on the CPU.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device "$@"
if [[ "$(made_for "$REPOSITORY/.venv")" == cuda ]]; then DEVICE=cuda; fi
open_environment "$REPOSITORY/.venv" "${BASH_SOURCE[0]}" "$REPOSITORY/pyproject.toml"
echo "This takes one to seven minutes."
# An environment that these scripts did not create may already have a torch of its own, which is kept.
if ! "$PYTHON" -m pip show -q torch 2>/dev/null; then
    if [[ "$DEVICE" == cpu ]]; then
        install_cpu_torch
    else
        # NCCL must be the same in trainer and server, and this is vLLM's.
        "$PYTHON" -m pip install -q "torch==$TORCH_VERSION"
    fi
fi
install_overlay -e "$REPOSITORY[dev]"
close_environment
