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
INSTALLER=""

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
    local status=$?
    if [[ -n "$INSTALLER" ]]; then
        kill -- "-$INSTALLER" 2>/dev/null || true
    fi
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

# install_servers: installs the environments of servers and clients, one after the other, and writes the output of each
# to a file.
install_servers() {
    local kind
    for kind in vllm sglang; do
        bash "scripts/install_$kind.sh" --cpu >"$LOGS/$kind" 2>&1 || return 1
    done
    bash scripts/install_clients.sh >"$LOGS/clients" 2>&1
}

# await_servers: waits for the installation in the background, and shows its output.
await_servers() {
    local status=0
    wait "$INSTALLER" || status=$?
    INSTALLER=""
    cat "$LOGS"/*
    return $status
}

lint() {
    ruff check . && ruff format --check .
}

# The tests are the same on every machine: they do not use a GPU.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

if [[ "$MODE" != --fast ]]; then
    # The servers are installed in the background, in a process group of their own, while the parts below run.
    set -m
    install_servers &
    INSTALLER=$!
    set +m
fi

part "install trainer" bash scripts/install.sh --cpu
export PATH="$REPOSITORY/.venv/bin:$PATH"

LONG=(-m "not long")
if [[ "$MODE" == --long ]]; then LONG=(); fi

part "ruff" lint
part "pyright" pyright --pythonpath .venv/bin/python
if [[ "$MODE" == --long ]]; then
    part "install SkyPilot" bash scripts/install_launcher.sh sky
fi
# Three tests run at a time, because most of them wait for some process.
part "unit tests" python -m pytest tests/unit_tests tests/streams -q -n 3 --durations=10 "${LONG[@]}"
if [[ "$MODE" == --fast ]]; then exit 0; fi

part "install servers (rest)" await_servers
if [[ "$MODE" == --long ]]; then
    part "install Ray" bash scripts/install_launcher.sh ray
fi
# Three, because whole runs need much memory. Their conftest.py puts the slowest ones first.
part "whole runs" python -m pytest tests/integration_tests -q -n 3 --no-loadscope-reorder \
    --durations=25 "${LONG[@]}"
