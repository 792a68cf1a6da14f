#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv, the trainer's environment, with the versions of requirements/. usage: bash scripts/install.sh [--cpu]
# A .venv that was created for GPUs is kept with --cpu: the CUDA build of torch also computes on the CPU.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

install_torch() {
    if [[ "$DEVICE" == cpu ]]; then
        install_cpu_torch
    else
        # NCCL must be the same in trainer and server, and this is vLLM's.
        locked torch.txt
    fi
}

parse_device "$@"
if [[ "$(made_for "$REPOSITORY/.venv")" == cuda ]]; then DEVICE=cuda; fi
LOCKS=("$REPOSITORY"/requirements/{trainer,torch,torch-cpu}.txt)
open_environment "$REPOSITORY/.venv" "${BASH_SOURCE[0]}" "$REPOSITORY/pyproject.toml" "${LOCKS[@]}"
echo "This takes one to seven minutes."
if is_adopted; then
    # It has packages of its own, perhaps another torch, which are kept where pyproject.toml allows them.
    echo "its packages are not those of requirements/trainer.txt: what is missing is installed in the newest version"
    has_torch || install_torch
    install_overlay -e "$REPOSITORY[dev,docs]"
else
    install_torch
    locked trainer.txt
    # Built by the setuptools of the lock file, which is installed.
    install_overlay --no-deps --no-build-isolation -e "$REPOSITORY"
fi
close_environment
