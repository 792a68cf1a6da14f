#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Creates .venv-sglang with SGLang 0.5.23.
# usage: bash scripts/install_sglang.sh [--cpu]
# Without a GPU, or with --cpu, SGLang computes with torch's own attention. The installation takes about two
# minutes and 3 GB. Such a server is good for testing the protocol; its speed means nothing.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

SGLANG_VERSION=0.5.23

# The requirements of SGLang without its CUDA packages.
CPU_REQUIREMENTS=(
    aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 einops fastapi gguf interegular
    'llguidance<2.0.0,>=1.7.6' 'mistral_common>=1.11.5' msgspec ninja numba==0.65.1 numpy openai==2.8.0
    openai-harmony==0.0.4 orjson outlines==0.1.11 packaging partial_json_parser pillow
    'prometheus-client>=0.20.0' psutil pybase64 pydantic 'python-dateutil<3' python-multipart
    'pyzmq>=25.1.2' regex requests scipy sentencepiece==0.2.1 setproctitle soundfile tiktoken
    tokenizers==0.23.2 'torch_memory_saver>=0.0.9.post1' tqdm transformers==5.19.0 'uvicorn>=0.51' uvloop
    watchfiles xgrammar==0.2.7 xxhash zstandard triton IPython dill
)

parse_device "$@"
open_environment "$REPOSITORY/.venv-sglang" "${BASH_SOURCE[0]}" <(entry_points)
echo "This takes two to seven minutes. Messages of pip about conflicting requirements are expected."
if [[ "$DEVICE" == cuda ]]; then
    "$PYTHON" -m pip install -q "sglang==$SGLANG_VERSION"
else
    install_cpu_torch
    "$PYTHON" -m pip install -q --no-deps "sglang==$SGLANG_VERSION" torchvision==0.28.0
    "$PYTHON" -m pip install -q "${CPU_REQUIREMENTS[@]}"
fi
install_overlay_alone
close_environment
