# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# scripts/grpo.slurm and scripts/grpo_servers.slurm source this file. It starts the steps of a job, ends them in order,
# and returns the job to the queue. Slurm's own ways to signal a step would lose what is running: SIGTERM to srun kills
# the step at once, and scancel --signal also reaches the children of the trainer, which then end before the trainer
# can ask them for rollouts.

STATUS=0     # exit status of the step that wait_for_step has waited for
REQUEUE=0    # 1 after the signal that comes before the time limit
INTERRUPTED=0
LAST_SECONDS=30 # time that steps have to end in order
declare -A STEP_PIDS=() STEP_GROUPS=()
# Each task has a file, named by node and task, because nodes may share the folder.
PID_FILES="${TMPDIR:-/tmp}/grpo-$SLURM_JOB_ID"

die() {
    echo "error: $*" >&2
    exit 2
}

# in_group GROUP ARGUMENTS...: calls srun in a part of a heterogeneous job, or in the only part of another job.
in_group() {
    local group=()
    if ((${SLURM_HET_SIZE:-1} > 1)); then group=("--het-group=$1"); fi
    srun "${group[@]}" "${@:2}"
}

# start_step NAME GROUP COMMAND...: starts COMMAND in each task of a part of the job, in the background. A task that
# ends does not end the others, which may be saving. Without --cpu-bind=none, each task would be bound to one core.
start_step() {
    STEP_GROUPS[$1]="$2"
    # shellcheck disable=SC2016  # the task expands it
    in_group "$2" --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \
        bash -c 'echo $$ >"$0.$SLURM_NODEID.$SLURM_LOCALID" && exec "$@"' "$PID_FILES-$1" "${@:3}" &
    STEP_PIDS[$1]=$!
}

# signal_step NAME: sends SIGTERM to the command of each task, and to nothing else. Does nothing if NAME has ended.
signal_step() {
    local srun="${STEP_PIDS[$1]-}"
    [[ -n "$srun" ]] && kill -0 "$srun" 2>/dev/null || return 0
    # shellcheck disable=SC2016  # the task expands it
    in_group "${STEP_GROUPS[$1]}" --overlap --cpu-bind=none \
        bash -c 'kill -TERM "$(<"$0.$SLURM_NODEID.$SLURM_LOCALID")"' "$PID_FILES-$1" \
        || kill "$srun" 2>/dev/null || true # the command has not begun, so there is nothing to save
}

stop_before_limit() {
    echo "The time limit is near: $1 end, and job $SLURM_JOB_ID goes back to the queue."
    REQUEUE=1 INTERRUPTED=1
    signal_step "$1"
}

# wait_for_step NAME: sets STATUS. A trap interrupts `wait`, which is then called again.
wait_for_step() {
    while :; do
        INTERRUPTED=0 STATUS=0
        wait "${STEP_PIDS[$1]}" || STATUS=$?
        ((INTERRUPTED)) || return 0
    done
}

# finish_job: waits until the steps end. Then it returns the job to the queue if the time limit was near and the job has
# not finished, and ends it otherwise.
finish_job() {
    local name
    trap '' USR1
    for name in "${!STEP_PIDS[@]}"; do
        for ((i = 0; i < LAST_SECONDS * 10; i++)); do
            kill -0 "${STEP_PIDS[$name]}" 2>/dev/null || break
            sleep 0.1
        done
    done
    if ((REQUEUE && STATUS != 0)); then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$STATUS"
}

# make_keys: sets the keys that servers on other hosts need, unless they are set. The steps inherit them.
make_keys() {
    local name
    for name in TORCHTITAN_GRPO_API_KEY TORCHTITAN_GRPO_ADMIN_KEY; do
        export "$name=${!name:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
    done
}
