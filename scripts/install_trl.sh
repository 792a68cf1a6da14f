#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-trl with the version of TRL that scripts/_env.sh names and the CPU build of torch, for
# benchmarks/against_trl.py. It takes about a minute and 1.5 GB. usage: bash scripts/install_trl.sh

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device --cpu
LOCKS=("$REPOSITORY"/requirements/{trl,torch-cpu}.txt)
open_environment "$REPOSITORY/.venv-trl" "${BASH_SOURCE[0]}" "${LOCKS[@]}"
install_cpu_torch
locked trl.txt
close_environment
