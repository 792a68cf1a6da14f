# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Replaces this process with an inference server that is started as a run would launch it.

    python .../torchtitan/grpo/system/light_start.py torchtitan.grpo.inference.serve \\
        vllm MODEL_DIR [--host H] [--port P] [--device D] [further server arguments]

`scripts/serve_vllm.sh` and `scripts/serve_sglang.sh` call it with the interpreter of their kind.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from torchtitan.grpo.inference.http import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.inference.kinds import KINDS
from torchtitan.grpo.inference.local_servers import default_device, mask_keys, server_command
from torchtitan.grpo.inference.server_spec import ServerSpec


def parse_arguments(arguments: list[str]) -> ServerSpec:
    """Returns the server of a command line. Unknown arguments are passed to the server."""
    parser = argparse.ArgumentParser(prog="serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("model_path", help="Hugging Face directory")
    parser.add_argument("--python", default=sys.executable, help="the server's interpreter")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-running-requests", type=int, default=64)
    options, extra = parser.parse_known_args(arguments)
    if not (Path(options.model_path) / "config.json").is_file():
        parser.error(
            f"MODEL_DIR must be a Hugging Face directory with a config.json, got {options.model_path}"
        )
    device = default_device(os.environ) if options.device == "auto" else options.device
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return ServerSpec(
        kind=options.kind,
        model_path=str(Path(options.model_path).resolve()),
        host=options.host,
        port=options.port,
        device=device,
        dtype=dtype,
        max_model_len=options.max_model_len,
        max_running_requests=options.max_running_requests,
        python=options.python,
        api_key=os.environ.get(API_KEY_VARIABLE),
        admin_key=os.environ.get(ADMIN_KEY_VARIABLE),
        extra_args=tuple(extra),
    )


def main() -> None:
    """Replaces this process with the server."""
    command, environ = server_command(parse_arguments(sys.argv[1:]), os.environ)
    print(f"+ {shlex.join(mask_keys(command))}", flush=True)
    os.execve(command[0], command, environ)


if __name__ == "__main__":
    main()
