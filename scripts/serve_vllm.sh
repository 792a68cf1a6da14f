#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Serves a model with vLLM and the options that a run of this project needs, on a GPU if there is one, and on a CPU
# otherwise.
# usage: bash scripts/serve_vllm.sh MODEL_DIR [--host H] [--port P] [--max-model-len N]
#            [--max-running-requests N] [--device cpu|cuda] [--dtype float32|bfloat16] [vLLM's own arguments]
#            [--register FOLDER_OR_URL] [--interface IF]
# With --register, the server registers itself with a run, and leaves the run when it ends; see
# docs/how-to/clusters.md.
# The longest sequence is the model's own (config.json) unless --max-model-len is given.
# Then start the trainer with --inference.kind vllm --inference.urls http://H:P. Keys are read from the environment
# variables TORCHTITAN_GRPO_API_KEY and TORCHTITAN_GRPO_ADMIN_KEY; another host than loopback needs them.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

(($#)) || die "usage: bash scripts/serve_vllm.sh MODEL_DIR [--port P] [further arguments]"
PYTHON="${TORCHTITAN_GRPO_VLLM_PYTHON:-$REPOSITORY/.venv-vllm/bin/python}"
[[ -x "$PYTHON" ]] || die "$PYTHON does not exist: run bash scripts/install_vllm.sh"
exec "$PYTHON" "$REPOSITORY/torchtitan/grpo/system/light_start.py" torchtitan.grpo.inference.serve \
    vllm "$1" --python "$PYTHON" "${@:2}"
