#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-ray with Ray, for scripts/launch_ray.py (15 s, 285 MB), or .venv-sky with SkyPilot, for
# scripts/skypilot/ (1 min, 460 MB). Where a cluster has an environment with Ray or SkyPilot, use that one.
# usage: bash scripts/install_launcher.sh ray|sky

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

case "${1-}" in
    ray | sky) ;;
    *) die "usage: bash scripts/install_launcher.sh ray|sky" ;;
esac
# shellcheck disable=SC2034  # open_environment reads it
DEVICE=any
open_environment "$REPOSITORY/.venv-$1" "${BASH_SOURCE[0]}" "$REPOSITORY/requirements/$1.txt"
locked "$1.txt"
close_environment
