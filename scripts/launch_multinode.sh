#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains on several nodes. Start the same command on each node, in any order and within 15 minutes. No node starts
# anything on another node.
# usage: bash scripts/launch_multinode.sh CONFIG.toml --nnodes N --rdzv-endpoint HOST:PORT
#            [--nproc N] [--interface IF] [--max-restarts N] [-- --table.key value ...]
#
#   option           variable        meaning
#   CONFIG.toml      GRPO_CONFIG     the run's configuration; the nodes share job.dump_folder
#   --nnodes         NNODES          number of nodes; with MIN:MAX, fewer nodes may continue, if the layout allows
#   --rdzv-endpoint  RDZV_ENDPOINT   one of the nodes, and a free port there (29400 if left out). This node gets rank
#                                    0 and starts the rollout process
#   --nproc          NPROC_PER_NODE  ranks on this node, which may differ from node to node (its visible GPUs, or 1)
#   --interface      GRPO_INTERFACE  interface to the other nodes (the one on the route to the endpoint)
#   --max-restarts   MAX_RESTARTS    how often the ranks start again from the newest checkpoint after a rank failed (0)
#   --rdzv-id        RDZV_ID         name of the run, the same on all nodes
#   --join-timeout   JOIN_TIMEOUT    seconds that nodes wait for one another, and for a node that is replaced (900)
#
# An option takes precedence over its variable. The variables alone are enough, so that srun or a pod can set them. The
# script prints the values that it uses. The trainer's environment is .venv, or that of the interpreter in
# TORCHTITAN_GRPO_PYTHON.
# To replace a node that died, start the same command again, there or on another machine; the other nodes wait for it.
# If the node of the endpoint dies, all nodes end. Then start the command on each node again.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

case "${1-}" in
    -h | --help) sed -n '5,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
PYTHON="${TORCHTITAN_GRPO_PYTHON:-$REPOSITORY/.venv/bin/python}"
[[ -x "$PYTHON" ]] || die "$PYTHON does not exist: run bash scripts/install.sh, or set TORCHTITAN_GRPO_PYTHON"
exec "$PYTHON" "$REPOSITORY/torchtitan/grpo/system/light_start.py" torchtitan.grpo.start.node "$@"
