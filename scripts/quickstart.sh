#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The whole system in miniature, on any machine: makes .venv and runs train_configs/quickstart.toml.
# usage: bash scripts/quickstart.sh [--table.key value ...]
# Arguments go to the trainer, such as --debug.seed 1 or --job.dump_folder outputs/other.
# Without a folder of its own, a run takes the place of the one before it in outputs/quickstart.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

bash scripts/install.sh

# Two ranks, unless there is exactly one GPU: NCCL refuses two ranks on one.
ranks=2
if has_gpu && [[ "$(visible_gpus)" == 1 ]]; then
    ranks=1
fi
overwrite=(--job.overwrite)
[[ "$*" == *--job.dump_folder* || "$*" == *--checkpoint.enable* ]] && overwrite=()
# On CPU each rank has a core; more threads than cores would only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
exec .venv/bin/torchrun --rdzv-backend torchtitan_grpo --nproc_per_node="$ranks" -m torchtitan.grpo_train \
    --job.config_file train_configs/quickstart.toml "${overwrite[@]}" "$@"
