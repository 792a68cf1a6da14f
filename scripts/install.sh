#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Makes .venv, the trainer's environment. usage: bash scripts/install.sh [--cpu]
# A .venv made for GPUs stays one, also with --cpu: torch's CUDA build computes on CPU, too.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device "$@"
if [[ "$(made_for "$REPOSITORY/.venv")" == cuda ]]; then DEVICE=cuda; fi
open_environment "$REPOSITORY/.venv" "${BASH_SOURCE[0]}" "$REPOSITORY/pyproject.toml"
# A torch that is already there, in an environment made by other means, may be a CUDA build.
if [[ "$DEVICE" == cpu ]] && ! "$PYTHON" -m pip show -q torch 2>/dev/null; then
    install_cpu_torch
fi
"$PYTHON" -m pip install -q -e "$REPOSITORY[dev]"
close_environment
