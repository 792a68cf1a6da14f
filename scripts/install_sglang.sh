#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-sglang with the version of SGLang that scripts/_env.sh names, and the packages of requirements/.
# usage: bash scripts/install_sglang.sh [--cpu]
# Without a GPU, or with --cpu, SGLang computes with torch's own attention. The installation takes about two
# minutes and 3 GB. Such a server is good for testing the protocol; its speed means nothing.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device "$@"
LOCKS=("$REPOSITORY"/requirements/{sglang,sglang-cpu,torch-cpu}.txt)
open_environment "$REPOSITORY/.venv-sglang" "${BASH_SOURCE[0]}" <(entry_points) "${LOCKS[@]}"
echo "This takes two to seven minutes."
if [[ "$DEVICE" == cuda ]]; then
    locked sglang.txt
else
    install_cpu_torch
    locked sglang-cpu.txt
fi
install_overlay_alone
close_environment
