#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs everything that CI runs, after installing what is missing: lint, types, unit tests, and whole runs with
# the embedded server, real vLLM and real SGLang, and real clients of agents. It ends with a table of its parts and their times.
# usage: bash scripts/test.sh [--fast | --long]
#   --fast  leaves out the server environments and the whole runs
#   --long  also runs the tests that only add confidence by repetition; run it before a release

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

MODE="${1-}"
case "$MODE" in
    "" | --fast | --long) ;;
    *) die "unknown argument $MODE; the known ones are --fast and --long" ;;
esac

LOGS="$(mktemp -d)"
TABLE=()
declare -A BACKGROUND=() # the process group of each command that runs beside the parts

# part NAME COMMAND...: runs a part and records its time for the table. If the part fails, the script ends.
part() {
    local name="$1" start=$SECONDS status=0
    shift
    echo "--- $name ($(date +%T))"
    "$@" || status=$?
    TABLE+=("$(printf '%-36s %2d:%02d  %s' "$name" $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60)) \
        "$([[ $status == 0 ]] && echo ok || echo FAILED)")")
    return $status
}

finish() {
    local status=$? pid
    for pid in "${BACKGROUND[@]}"; do
        kill -- "-$pid" 2>/dev/null || true
    done
    rm -rf "$LOGS"
    echo
    echo "part                                  time  result"
    printf '%s\n' "${TABLE[@]}"
    printf '%-36s %2d:%02d  %s\n' total $((SECONDS / 60)) $((SECONDS % 60)) \
        "$([[ $status == 0 ]] && echo ok || echo FAILED)"
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# beside NAME COMMAND...: runs a command in a process group of its own while the parts below run.
beside() {
    local name="$1"
    shift
    set -m
    "$@" >"$LOGS/$name" 2>&1 &
    BACKGROUND[$name]=$!
    set +m
}

# await NAME: waits for the command that beside has started under this name, and shows its output.
await() {
    local status=0
    wait "${BACKGROUND[$1]}" || status=$?
    unset "BACKGROUND[$1]"
    cat "$LOGS/$1"
    return $status
}

# install_servers: installs the environments of servers and clients, one after the other.
install_servers() {
    local kind
    for kind in vllm sglang; do
        bash "scripts/install_$kind.sh" --cpu || return 1
    done
    bash scripts/install_clients.sh
}

lint() {
    ruff check . && ruff format --check .
}

# install_chromium: the tests of `torchtitan-grpo report` open its page in a browser.
install_chromium() {
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then return; fi
    if [[ $EUID != 0 ]]; then echo "Chromium is missing, and only root can install it: the tests of the report fail"; return; fi
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium
}

# The tests are the same on every machine: they do not use a GPU.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# Python compiles the modules that are imported. Without this setting, pip would compile every module of each package.
export PIP_NO_COMPILE=1
unset PYTHONDONTWRITEBYTECODE

# uv takes 11 s of a core for the trainer's packages, and the tests need the cores meanwhile. Without it, pip installs.
"$(find_python)" -m pip install -q --target "$LOGS/uv" "uv==$UV_VERSION" || true
export PATH="$LOGS/uv/bin:$PATH"
if [[ -n "${PIP_FIND_LINKS-}" ]]; then export UV_FIND_LINKS="$PIP_FIND_LINKS"; fi

if [[ "$MODE" != --fast ]]; then beside servers install_servers; fi

part "install Chromium" install_chromium
part "install trainer" bash scripts/install.sh --cpu
export PATH="$REPOSITORY/.venv/bin:$PATH"

LONG=(-m "not long")
if [[ "$MODE" == --long ]]; then LONG=(); fi

# One process compiles what several test workers would otherwise compile at the same time.
part "compile what is imported" python -c "import torchtitan.grpo_train"
part "ruff" lint
beside pyright pyright --pythonpath .venv/bin/python
if [[ "$MODE" == --long ]]; then
    part "install SkyPilot" bash scripts/install_launcher.sh sky
fi
# Three tests run at a time, because most of them wait for some process.
part "unit tests" python -m pytest tests/unit_tests tests/streams -q -n 3 --durations=10 "${LONG[@]}"
part "pyright (rest)" await pyright
if [[ "$MODE" == --fast ]]; then exit 0; fi

part "install servers (rest)" await servers
if [[ "$MODE" == --long ]]; then
    part "install Ray" bash scripts/install_launcher.sh ray
fi
# Three, because whole runs need much memory. Their conftest.py puts the slowest ones first.
part "whole runs" python -m pytest tests/integration_tests -q -n 3 --no-loadscope-reorder \
    --durations=25 "${LONG[@]}"
