#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs one inference server on a node of a cluster, and registers it with the run. The launchers for clusters start
# servers with this script: scripts/grpo*.slurm, scripts/kubernetes/, scripts/skypilot/ and scripts/launch_ray.py.
# usage: bash scripts/serve_node.sh MODEL_DIR [server arguments]
#
#   variable         meaning
#   GRPO_REGISTRY    folder that the run can also read (inference.registry), or http://host:port of rank 0
#   SERVER_KIND      vllm, sglang or embedded (vllm)
#   SERVER_HOST      address at which the trainers reach this node (that of GRPO_INTERFACE, or of the default route)
#   SERVER_PORT      (a free port)
#   SERVER_RESTARTS  how often a server that ended by itself is started again (0)
#   TORCHTITAN_GRPO_API_KEY, TORCHTITAN_GRPO_ADMIN_KEY  keys, the same as the trainer's

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

(($#)) || die "usage: bash scripts/serve_node.sh MODEL_DIR [server arguments]"
[[ -n "${GRPO_REGISTRY-}" ]] || die "GRPO_REGISTRY must name the folder, or the URL, at which the server registers itself"
kind="${SERVER_KIND:-vllm}"
if [[ "$kind" == embedded ]]; then
    PYTHON="${TORCHTITAN_GRPO_PYTHON:-$REPOSITORY/.venv/bin/python}"
    install=install.sh
else
    variable="TORCHTITAN_GRPO_${kind^^}_PYTHON"
    PYTHON="${!variable:-$REPOSITORY/.venv-$kind/bin/python}"
    install="install_$kind.sh"
fi
[[ -x "$PYTHON" ]] || die "$PYTHON does not exist: run bash scripts/$install, or set SERVER_KIND to another kind"
command=("$PYTHON" "$REPOSITORY/torchtitan/grpo/system/light_start.py" torchtitan.grpo.inference.serve
    "$kind" "$1" --python "$PYTHON" --register "$GRPO_REGISTRY" "${@:2}")
if [[ -n "${SERVER_HOST-}" ]]; then command+=(--host "$SERVER_HOST"); fi
if [[ -n "${SERVER_PORT-}" ]]; then command+=(--port "$SERVER_PORT"); fi

restarts="${SERVER_RESTARTS:-0}"
if ((restarts == 0)); then exec "${command[@]}"; fi

stopped=0 server=""
trap 'stopped=1; [[ -z "$server" ]] || kill -TERM "$server" 2>/dev/null || true' TERM INT HUP
for ((start = 1; start <= restarts + 1 && !stopped; start++)); do
    "${command[@]}" &
    server=$!
    while :; do # a signal interrupts `wait`
        status=0
        wait "$server" || status=$?
        kill -0 "$server" 2>/dev/null || break
    done
    ((stopped)) || echo "The $kind server ended with status $status (start $start of $((restarts + 1)))." >&2
done
exit "$status"
