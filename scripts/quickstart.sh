#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs the whole system in miniature on any machine. It creates .venv and runs train_configs/quickstart.toml.
# usage: bash scripts/quickstart.sh [--table.key value ...]
# Arguments such as --debug.seed 1 or --job.dump_folder outputs/other are passed to the trainer.
# A run without a folder of its own replaces the run before it in outputs/quickstart.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

bash scripts/install.sh

# There are two ranks, unless there is exactly one GPU: NCCL refuses two ranks on one GPU.
ranks=2
if has_gpu && [[ "$(visible_gpus)" == 1 ]]; then
    ranks=1
fi
overwrite=(--job.overwrite)
[[ "$*" == *--job.dump_folder* || "$*" == *--checkpoint.enable* ]] && overwrite=()
# On a CPU, each rank has one core, and more threads than cores would slow each other down.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
exec .venv/bin/torchtitan-grpo train train_configs/quickstart.toml --nproc "$ranks" "${overwrite[@]}" "$@"
