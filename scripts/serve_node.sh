#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Runs one inference server on a node of a cluster, where trainers on other nodes reach it, and registers it.
# scripts/grpo*.slurm, scripts/kubernetes/, scripts/skypilot/ and scripts/launch_ray.py start this.
# usage: bash scripts/serve_node.sh MODEL_DIR [server arguments]
#
#   variable         meaning
#   SERVER_KIND      vllm, sglang or embedded (vllm)
#   GRPO_REGISTRY    where the server registers itself; see torchtitan-grpo serve --register
#   SERVER_PORT      port of the first server of a node (8000)
#   SERVER_INDEX     number of this server on its node (SLURM_LOCALID, or 0); the port is SERVER_PORT plus this
#   SERVER_HOST      address by which the trainers reach this node (that of the host's name)
#   SERVER_RESTARTS  how often a server that ended by itself is started again (0)
#   TORCHTITAN_GRPO_API_KEY, TORCHTITAN_GRPO_ADMIN_KEY  keys, the same as the trainer's

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

(($#)) || die "usage: bash scripts/serve_node.sh MODEL_DIR [server arguments]"
kind="${SERVER_KIND:-vllm}"
[[ -n "${GRPO_REGISTRY-}" ]] || die "GRPO_REGISTRY must say where the server registers itself"
port=$((${SERVER_PORT:-8000} + ${SERVER_INDEX:-${SLURM_LOCALID:-0}}))
host="${SERVER_HOST:-$(hostname -i | cut -d' ' -f1)}"
if [[ "$kind" == embedded ]]; then
    PYTHON="${TORCHTITAN_GRPO_PYTHON:-$REPOSITORY/.venv/bin/python}"
else
    variable="TORCHTITAN_GRPO_${kind^^}_PYTHON"
    PYTHON="${!variable:-$REPOSITORY/.venv-$kind/bin/python}"
fi
[[ -x "$PYTHON" ]] || die "$PYTHON does not exist: run bash scripts/install${kind:+_$kind}.sh, or set SERVER_KIND"
command=("$PYTHON" "$REPOSITORY/torchtitan/grpo/system/light_start.py" torchtitan.grpo.inference.serve
    "$kind" "$1" --python "$PYTHON" --host "$host" --port "$port" --register "$GRPO_REGISTRY" "${@:2}")

restarts="${SERVER_RESTARTS:-0}"
if ((restarts == 0)); then exec "${command[@]}"; fi

stopped=0 server=""
trap 'stopped=1; [[ -z "$server" ]] || kill -TERM "$server" 2>/dev/null || true' TERM INT
for ((attempt = 0; attempt <= restarts && !stopped; attempt++)); do
    "${command[@]}" &
    server=$!
    status=0
    wait "$server" || status=$?
    while kill -0 "$server" 2>/dev/null; do
        status=0
        wait "$server" || status=$?
    done
    ((stopped)) || echo "The $kind server at $host:$port ended with status $status (start $((attempt + 1)))." >&2
done
exit "$status"
