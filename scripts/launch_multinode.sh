#!/usr/bin/env bash
# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# Trains on several nodes. Start the same command on each of them, in any order and within 15 minutes; nothing is
# started from one node on another.
# usage: bash scripts/launch_multinode.sh CONFIG.toml --nnodes N --rdzv-endpoint HOST:PORT
#            [--nproc N] [--interface IF] [--max-restarts N] [-- --table.key value ...]
#
#   option           variable        meaning
#   CONFIG.toml      GRPO_CONFIG     the run's configuration; the nodes share job.dump_folder
#   --nnodes         NNODES          number of nodes; MIN:MAX goes on with fewer, if the layout allows
#   --rdzv-endpoint  RDZV_ENDPOINT   one of the nodes, and a free port there (29400 if left out). This node gets rank
#                                    0 and starts the rollout process
#   --nproc          NPROC_PER_NODE  ranks on this node, which may differ from node to node (its visible GPUs, or 1)
#   --interface      GRPO_INTERFACE  interface to the other nodes (the one on the route to the endpoint)
#   --max-restarts   MAX_RESTARTS    how often the ranks begin again from the newest checkpoint after some failed (0)
#   --rdzv-id        RDZV_ID         name of the run, the same on all nodes
#   --join-timeout   JOIN_TIMEOUT    seconds that nodes wait for one another, also for one that is replaced (900)
#
# An option comes before its variable, so that srun or a pod may set variables alone. What is decided is printed.
# The trainer's environment is .venv, or that of the interpreter in TORCHTITAN_GRPO_PYTHON.
# A node that died is replaced by starting the same command again, there or on another machine; the others wait.
# If the node of the endpoint dies, all end: start the command on each again.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

case "${1-}" in
    -h | --help) sed -n '5,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
PYTHON="${TORCHTITAN_GRPO_PYTHON:-$REPOSITORY/.venv/bin/python}"
[[ -x "$PYTHON" ]] || die "$PYTHON does not exist: run bash scripts/install.sh, or set TORCHTITAN_GRPO_PYTHON"
exec "$PYTHON" "$REPOSITORY/torchtitan/grpo/system/light_start.py" torchtitan.grpo.start.node "$@"
