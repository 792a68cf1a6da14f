# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the subcommands of the console script ``torchtitan-grpo``.

    torchtitan-grpo check-config X.toml [--table.key value ...]
    torchtitan-grpo serve embedded MODEL_DIR [--port P]
    torchtitan-grpo verify --kind vllm --url http://host:port --run outputs/run ...

Training is started by ``torchrun -m torchtitan.grpo_train``.
"""

import sys

USAGE = (__doc__ or "").split("\n\n", 1)[1]


def check_config(arguments: list[str]) -> int:
    """Checks a configuration, and prints it with all defaults and the planned layout."""
    from torchtitan.grpo.config_checks import ConfigError, check_model
    from torchtitan.grpo.config_checks.description import describe
    from torchtitan.grpo.config_manager import load_config
    from torchtitan.grpo.models.hf_config import ModelError, read_hf_model

    if arguments and not arguments[0].startswith("-"):
        arguments = ["--job.config_file", *arguments]
    try:
        config = load_config(arguments)
        model = read_hf_model(config.model.hf_assets_path)
        check_model(config, model)
    except (ConfigError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(config))
    print(f"  model: {model.architecture} at {model.path}")
    return 0


def serve(arguments: list[str]) -> int:
    """Runs an inference server in this process."""
    from torchtitan.grpo.inference import serve as module

    sys.argv = ["torchtitan-grpo serve", *arguments]
    module.main()
    return 0


def verify(arguments: list[str]) -> int:
    """Checks that a server serves the weights that a run exported."""
    from torchtitan.grpo.verify import main as verify_main

    return verify_main(arguments)


COMMANDS = {"check-config": check_config, "serve": serve, "verify": verify}


def main() -> None:
    """Runs the subcommand that the command line names."""
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name not in COMMANDS:
        print(USAGE, file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    sys.exit(COMMANDS[name](arguments))
