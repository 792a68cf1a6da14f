# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The other scripts source this file. It finds Python and GPUs and makes virtual environments. A server never
# shares the trainer's environment, because their requirements conflict.

set -euo pipefail

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ADOPTED=" adopted" # suffix of the stamp of an environment that these scripts did not create
TORCH_VERSION=2.13.0
TORCHVISION_VERSION=0.28.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
VLLM_VERSION=0.32.0
SGLANG_VERSION=0.5.23
TRL_VERSION=1.16.0
UV_VERSION=0.13.9

# Without bytecode files, a server would spend a minute compiling its sources at each start.
unset PYTHONDONTWRITEBYTECODE

die() {
    echo "error: $*" >&2
    exit 1
}

has_gpu() {
    [[ "${CUDA_VISIBLE_DEVICES-all}" != "" ]] && command -v nvidia-smi >/dev/null \
        && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# visible_gpus: prints the number of GPUs that a process started here can use.
visible_gpus() {
    if [[ -n "${CUDA_VISIBLE_DEVICES-}" ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
    else
        nvidia-smi -L | grep -c GPU
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null \
            && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            # If this is the Python of a virtual environment, print the interpreter that the environment
            # was created with: the environment itself may be about to be replaced.
            "$candidate" -c 'import sys; v = sys.version_info
print(f"{sys.base_prefix}/bin/python{v[0]}.{v[1]}" if sys.prefix != sys.base_prefix else sys.executable)'
            return
        fi
    done
    die "Python 3.11 or newer is needed, found none on PATH"
}

# parse_device "$@": sets DEVICE to cpu or cuda. --cpu forces cpu. --cuda forces cuda, for images that are built on
# machines without a GPU.
parse_device() {
    DEVICE=cpu
    if has_gpu; then DEVICE=cuda; fi
    while (($#)); do
        case "$1" in
            --cpu) DEVICE=cpu ;;
            --cuda) DEVICE=cuda ;;
            *) die "unknown argument $1; the known ones are --cpu and --cuda" ;;
        esac
        shift
    done
}

# made_for FOLDER: prints the device (cpu or cuda) that these scripts created FOLDER for, or nothing if they
# did not create it.
made_for() {
    cut -d' ' -f1 "$1/.complete" 2>/dev/null || true
}

# open_environment FOLDER RECIPE_FILE...: exits 0 if FOLDER is complete and was created from the same recipes.
# Otherwise it replaces an environment that these scripts created, and keeps one that was created by other
# means, into which the caller then installs. Sets PYTHON, and STAMP for close_environment.
open_environment() {
    local folder="$1" found python
    shift
    PYTHON="$folder/bin/python"
    STAMP_FILE="$folder/.complete"
    STAMP="$DEVICE $(cat "$@" | sha256sum | cut -d' ' -f1)"
    found="$(cat "$STAMP_FILE" 2>/dev/null || true)"
    if [[ -x "$PYTHON" && "${found%$ADOPTED}" == "$STAMP" ]]; then
        echo "$folder is complete ($DEVICE)"
        exit 0
    fi
    if [[ -x "$PYTHON" && (-z "$found" || "$found" == *"$ADOPTED") ]]; then
        STAMP+="$ADOPTED"
        echo "installing into $folder ($DEVICE), which these scripts did not create"
        return
    fi
    python="$(find_python)"
    echo "creating $folder ($DEVICE) with $python"
    rm -rf "$folder"
    "$python" -m venv "$folder"
}

# is_adopted: succeeds if open_environment found an environment that these scripts did not create.
is_adopted() {
    [[ "$STAMP" == *"$ADOPTED" ]]
}

# entry_points: prints the entry points of pyproject.toml. A server finds its plugin by them, and they are
# copied when the overlay is installed, so they are part of the recipe of a server's environment.
entry_points() {
    sed -n '/^\[project.entry-points/,/^$/p' "$REPOSITORY/pyproject.toml"
}

# install_overlay PIP_ARGUMENTS...: installs this repository, one environment at a time, because all
# installations write to the same build folders in the repository.
install_overlay() {
    if command -v flock >/dev/null; then
        flock "$REPOSITORY/pyproject.toml" "$PYTHON" -m pip install -q "$@"
    else
        "$PYTHON" -m pip install -q "$@"
    fi
}

# install_overlay_alone: installs the overlay without its requirements, for a server's environment. torchtitan is not
# installed there, so the overlay's folder is a namespace package, which an editable install finds in this mode only.
install_overlay_alone() {
    # The build uses the setuptools of the lock file, which is installed.
    install_overlay --no-deps --no-build-isolation --config-settings editable_mode=compat -e "$REPOSITORY"
}

close_environment() {
    echo "$STAMP" >"$STAMP_FILE"
    echo "done"
}

# locked FILE PIP_ARGUMENTS...: installs the packages of requirements/FILE with their versions and hashes, and no others.
# Where uv is on PATH, it does so, in less time. It does not read pip's configuration: what it does not find, pip may.
locked() {
    local arguments=(install -q --no-deps --require-hashes -r "$REPOSITORY/requirements/$1" "${@:2}")
    if command -v uv >/dev/null; then
        local compile=(--compile-bytecode)
        if [[ -n "${PIP_NO_COMPILE-}" ]]; then compile=(); fi
        if uv pip "${arguments[@]}" --python "$PYTHON" "${compile[@]}" 2>/dev/null; then return; fi
    fi
    "$PYTHON" -m pip "${arguments[@]}"
}

# select_packages with|without PATTERN: reads a lock file from stdin, and prints the packages whose names match, or do
# not match.
select_packages() {
    awk -v keep="$1" -v pattern="^($2)==" '
        /^[a-z0-9]/ { shown = ($0 ~ pattern) == (keep == "with") }
        shown { print }'
}

has_torch() {
    "$PYTHON" -m pip show -q torch 2>/dev/null
}

# install_cpu_torch: installs the CPU build of torch without its requirements, which are in the lock files. The servers'
# CPU builds were linked against it. If the configured index does not have it (on PyPI, torch for Linux is the CUDA
# build), it comes from PyTorch's own index.
install_cpu_torch() {
    if [[ "$(uname -s)" == Linux ]]; then
        locked torch-cpu.txt 2>/dev/null || locked torch-cpu.txt --extra-index-url "$TORCH_CPU_INDEX" || true
        if has_torch; then return; fi
        if ! grep -q "$(machine_marker)" "$REPOSITORY/requirements/torch-cpu.txt"; then
            echo "requirements/torch-cpu.txt has no hash of torch for this Python and machine: torch is installed by its version alone"
            "$PYTHON" -m pip install -q --no-deps --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION+cpu" || true
        fi
        if has_torch; then return; fi
        echo "no index has the CPU build of torch $TORCH_VERSION with a known hash: PyPI's build is installed, which is larger"
    fi
    locked torch.txt
}

# machine_marker: prints the marker of this Python and machine in requirements/torch-cpu.txt.
machine_marker() {
    "$PYTHON" -c 'import platform, sys; print(
        f"python_version == \"{sys.version_info[0]}.{sys.version_info[1]}\" and "
        f"platform_machine == \"{platform.machine()}\"")'
}
