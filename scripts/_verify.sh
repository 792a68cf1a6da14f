# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# The verify scripts source this file. It starts a server, trains against it, and compares the two.

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
cd "$REPOSITORY"

MODEL=assets/reverse_digits/model
# bfloat16 alone changes logprobs of a token by up to 0.04 (this model), or by 0.03 on average and seldom by more than
# 0.3 (SmolLM2-135M). Stale weights may pass this bound; the versions of the server and of the export must agree, too.
BFLOAT16_TOLERANCE=3e-1

# parse_server "$@": sets SERVER, MODEL, DTYPE and EXTRA. DTYPE is empty if it is not given.
parse_server() {
    SERVER=embedded
    DTYPE=""
    EXTRA=()
    while (($#)); do
        case "$1" in
            --server)
                SERVER="${2-}"
                shift
                ;;
            --server=*) SERVER="${1#*=}" ;;
            --model)
                MODEL="${2-}"
                shift
                ;;
            --dtype)
                DTYPE="${2-}"
                shift
                ;;
            *) EXTRA+=("$1") ;;
        esac
        shift
    done
    local folder=torchtitan/grpo/inference variable="TORCHTITAN_GRPO_${SERVER^^}_PYTHON"
    [[ -n "$SERVER" && -f "$folder/$SERVER/client.py" ]] \
        || die "--server must be one of $(cd "$folder" && echo */client.py | sed 's|/client.py||g'), got '$SERVER'"
    # A kind that needs an environment of its own has a script that installs it.
    SERVER_PYTHON="$REPOSITORY/.venv/bin/python"
    if [[ -f "scripts/install_$SERVER.sh" ]]; then
        SERVER_PYTHON="${!variable:-$REPOSITORY/.venv-$SERVER/bin/python}"
    fi
}

# start_server DEVICE: starts $SERVER on a free loopback port, and sets URL. The server ends with this script.
start_server() {
    local port log="$DUMP_FOLDER/server.log"
    port="$("$PYTHON" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    URL="http://127.0.0.1:$port"
    mkdir -p "$DUMP_FOLDER"
    : >"$log"
    chmod 600 "$log" # a server's log shows its settings
    echo "starting $SERVER at $URL on $1, log in $log"
    # The server gets a session of its own, so that it and its workers end together.
    setsid "$PYTHON" torchtitan/grpo/system/light_start.py torchtitan.grpo.inference.serve "$SERVER" "$MODEL" \
        --python "$SERVER_PYTHON" --port "$port" --device "$1" --dtype "$DTYPE" \
        --max-model-len 256 --max-running-requests 32 >"$log" 2>&1 &
    SERVER_PID=$!
    trap stop_server EXIT
    trap 'exit 130' INT TERM
}

stop_server() {
    kill -TERM -- "-$SERVER_PID" 2>/dev/null || true
    for _ in $(seq 30); do
        kill -0 -- "-$SERVER_PID" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL -- "-$SERVER_PID" 2>/dev/null || true
}

# train_and_verify RANKS TOLERANCE [trainer arguments]: trains, and compares the server with the exported model.
train_and_verify() {
    local ranks="$1" tolerance="$2"
    shift 2
    # Called by the interpreter's path, because `torchrun` on PATH may belong to another environment.
    "$PYTHON" -m torch.distributed.run --rdzv-backend torchtitan_grpo --nproc_per_node="$ranks" -m torchtitan.grpo_train \
        --job.config_file train_configs/verify.toml --job.dump_folder "$DUMP_FOLDER" --job.overwrite \
        --training.mixed_precision_param "$DTYPE" --model.hf_assets_path "$MODEL" --inference.kind "$SERVER" --inference.urls "$URL" "$@"
    "$PYTHON" -m torchtitan.grpo.commands.verify --kind "$SERVER" --url "$URL" --run "$DUMP_FOLDER" \
        --prompts assets/reverse_digits/heldout.jsonl --tolerance "$tolerance"
    echo "verified: $SERVER serves the trainer's weights"
}
