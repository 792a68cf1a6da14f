# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Sourced by the other scripts: finds Python and GPUs, and makes virtual environments. A server's is never
# the trainer's own, since their requirements contradict.

set -euo pipefail

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ADOPTED=" adopted" # ends the stamp of an environment that was made by other means
TORCH_VERSION=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# Without bytecode files, each start of a server would compile its sources for a minute.
unset PYTHONDONTWRITEBYTECODE

die() {
    echo "error: $*" >&2
    exit 1
}

has_gpu() {
    [[ "${CUDA_VISIBLE_DEVICES-all}" != "" ]] && command -v nvidia-smi >/dev/null \
        && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# How many GPUs a process started here sees.
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
            # Of an environment, the interpreter that it was made with: it may be the very one that is
            # about to be made anew.
            "$candidate" -c 'import sys; v = sys.version_info
print(f"{sys.base_prefix}/bin/python{v[0]}.{v[1]}" if sys.prefix != sys.base_prefix else sys.executable)'
            return
        fi
    done
    die "Python 3.11 or newer is needed, found none on PATH"
}

# parse_device "$@": sets DEVICE to cpu or cuda; --cpu forces cpu.
parse_device() {
    DEVICE=cpu
    if has_gpu; then DEVICE=cuda; fi
    while (($#)); do
        case "$1" in
            --cpu) DEVICE=cpu ;;
            *) die "unknown argument $1; the only one is --cpu" ;;
        esac
        shift
    done
}

# made_for FOLDER: cpu or cuda, what these scripts made FOLDER for; nothing where they did not make it.
made_for() {
    cut -d' ' -f1 "$1/.complete" 2>/dev/null || true
}

# open_environment FOLDER RECIPE_FILE...: exits 0 where FOLDER was made by these very recipes. Else an
# environment that these scripts made is made anew, and one made by other means is installed into, now and
# later. Sets PYTHON, and STAMP for close_environment.
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
        echo "installing into $folder ($DEVICE), which was made by other means"
        return
    fi
    python="$(find_python)"
    echo "making $folder ($DEVICE) with $python"
    rm -rf "$folder"
    "$python" -m venv "$folder"
}

# The overlay alone, for a server's environment, where torchtitan is not installed: the overlay's folder
# is then a namespace package, which an editable install finds in this mode only.
install_overlay_alone() {
    "$PYTHON" -m pip install -q --no-deps --config-settings editable_mode=compat -e "$REPOSITORY"
}

close_environment() {
    echo "$STAMP" >"$STAMP_FILE"
    echo "done"
}

# The servers' CPU builds were linked against torch's CPU build. Where the configured index has none
# (PyPI's torch for Linux is the CUDA one), PyTorch's own index does.
install_cpu_torch() {
    "$PYTHON" -m pip install -q "torch==$TORCH_VERSION+cpu" 2>/dev/null \
        || "$PYTHON" -m pip install -q --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION+cpu" \
        || "$PYTHON" -m pip install -q "torch==$TORCH_VERSION"
}
