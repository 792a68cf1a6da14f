#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Makes .venv, the trainer's environment. usage: bash scripts/install.sh [--cpu]

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parse_device "$@"
open_environment "$REPOSITORY/.venv" "${BASH_SOURCE[0]}" "$REPOSITORY/pyproject.toml"
if [[ "$DEVICE" == cpu ]]; then
    install_cpu_torch
fi
"$PYTHON" -m pip install -q -e "$REPOSITORY[dev]"
close_environment
