# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The commands of ``torchtitan-grpo``, the console script."""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from torchtitan.grpo.commands.json_result import JSON_FLAG, json_object
from torchtitan.grpo.config.command_line import ConfigError, without_torch
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.logs import outlive_readers
from torchtitan.grpo.system.strict_json import Found

USAGE = """\
usage: torchtitan-grpo COMMAND ...

  init MODEL DATA [--output X.toml]
      Write a configuration for a model and a data set, with a reason in every
      line. init --help lists the options.
  train X.toml [--gpus N] [--max-restarts N] [--table.key value ...]
      Train: starts the ranks on this machine, and the servers if
      inference.launch is set. train --help lists every setting.
  sft X.toml [--gpus N] [--max-restarts N] [--table.key value ...]
      Train on given completions ([sft]), without servers and rewards.
  check-config X.toml [--gpus N] [--settings] [--table.key value ...]
      Open what a run would open (model, prompts, rewards), and print what was
      found; --settings adds the value of every setting. No server and no
      training rank is started.
  schedule X.toml [--times F I W] [--picture FILE.png] [--table.key value ...]
      Show what the pipeline's ranks do over time, and compare all schedules.
  plan X.toml [--from RUN_FOLDER] [--devices N] [--table.key value ...]
      Simulate a run: samples a second, idle times, the best split of N devices
      between training and servers, and which setting to change first.
  evaluate X.toml [--model DIR | --checkpoint STEP] [--output F.json] [--table.key value ...]
      Evaluate a model directory or a checkpoint of the run on the held-out
      prompts of [evaluation], without training. Servers as the file says.
  serve embedded MODEL_DIR [--port P] [--register FOLDER_OR_URL]
      Run an inference server. scripts/serve_vllm.sh and scripts/serve_sglang.sh
      run the other kinds.
  timeline RUN_FOLDER [-o FILE]
      Merge what a run with observe.timeline recorded into a trace for Perfetto.
  report RUN [RUN ...] [-o FILE] [--steps FIRST-LAST] [--watch] [--json]
      Write a page about a run, or one that compares runs: what to change,
      curves, who waited, completions, settings. It needs no network.
  show FILE
      Print recorded rollouts (rollout.record) as JSON lines.
  verify --kind vllm --url http://host:port --run outputs/run --prompts X.jsonl
      Check that a server serves the weights that a run exported.
  check-gpu [--budget-seconds N] [--only NAME] [--output FOLDER] [--list] [--device cpu]
      Measure on this machine's GPU what tests without one cannot tell (15
      minutes). It needs a clone of the repository.
  versions
      Print the versions of this package and of those that a run depends on.

check-config, plan, evaluate and verify take --json (docs/how-to/python.md).

  --help, --version

On several nodes, start the same command on each of them:
  bash scripts/launch_multinode.sh X.toml --nnodes N --rdzv-endpoint HOST:PORT
"""
_HELP = ("-h", "--help", "help")


def _imported(module: str, name: str) -> Callable[..., int]:
    """Returns a command whose module is imported only when it is called."""

    def command(*given: list[str] | Found) -> int:
        with without_torch():
            function = getattr(importlib.import_module(f"torchtitan.grpo.{module}"), name)
        return function(*given)

    return command


def sft(arguments: list[str]) -> int:
    with without_torch():
        from torchtitan.grpo.start.train import parse, read_settings
        from torchtitan.grpo.start.train import train as start

    if read_settings(parse(arguments)).sft.path is None:
        raise ConfigError(
            "torchtitan-grpo sft needs sft.path, a file with examples, got none. Set it, or train on "
            "rollouts with torchtitan-grpo train."
        )
    return start(arguments)


def check_config(arguments: list[str], found: Found) -> int:
    """Prints a run's inputs and layout; the exit status is 2 if the run would be refused."""
    found["warnings"] = []
    with without_torch():
        from torchtitan.grpo.start.train import SETTINGS_FLAG, as_trained
    with as_trained([word for word in arguments if word != SETTINGS_FLAG]) as rest:
        from torchtitan.grpo.start.entry import check_only

        return check_only(rest, found, shows_settings=SETTINGS_FLAG in arguments)


def schedule(arguments: list[str]) -> int:
    from torchtitan.grpo.commands.schedule import options

    with without_torch():
        from torchtitan.grpo.start.train import as_trained
    given, others = options().parse_known_args(arguments)
    with as_trained(others) as rest:
        from torchtitan.grpo.commands.schedule import show_schedules
        from torchtitan.grpo.config_checks import load_config

        config = load_config(rest)
        degree = config.parallelism.pipeline_parallel_degree
        if degree == 1:
            raise ConfigError(
                f"parallelism.pipeline_parallel_degree must be above 1 to have a schedule, got {degree}."
            )
        show_schedules(config, given)
    return 0


def evaluate(arguments: list[str], found: Found) -> int:
    from torchtitan.grpo.commands.evaluate import evaluate as run_evaluation
    from torchtitan.grpo.commands.evaluate import options

    with without_torch():
        from torchtitan.grpo.start.train import as_trained
    given, others = options().parse_known_args(arguments)
    # The layout is checked as for training, and is not used.
    with as_trained(others) as rest:
        return run_evaluation(given, rest, found)


def serve(arguments: list[str]) -> int:
    from torchtitan.grpo.inference import serve as module

    sys.argv = ["torchtitan-grpo serve", *arguments]
    module.main()
    return 0


def check_gpu(arguments: list[str]) -> int:
    benchmarks = Path(__file__).resolve().parents[3] / "benchmarks"
    if not (benchmarks / "check_gpu").is_dir():
        raise RunError(
            f"torchtitan-grpo check-gpu needs a clone of the repository, whose checks are in "
            f"benchmarks/check_gpu, got no folder {benchmarks}. Install from a clone: bash scripts/install.sh."
        )
    sys.path.insert(0, str(benchmarks))
    from check_gpu.command import main as check_main

    return check_main(arguments)


def versions(arguments: list[str]) -> int:
    from torchtitan.grpo.run_folder.start_record import package_versions

    print(f"python {platform.python_version()}")
    for name, number in package_versions().items():
        print(f"{name} {number}")
    return 0


def version() -> str:
    return importlib.metadata.version("torchtitan-grpo")


COMMANDS: dict[str, Callable[..., int]] = {
    "init": _imported("commands.init.command", "init"),
    "train": _imported("start.train", "train"),
    "sft": sft,
    "check-config": check_config,
    "schedule": schedule,
    "plan": _imported("commands.forecast.command", "plan"),
    "evaluate": evaluate,
    "serve": serve,
    "timeline": _imported("commands.timeline", "timeline"),
    "report": _imported("commands.report.command", "report"),
    "show": _imported("commands.show", "show"),
    "verify": lambda *of: importlib.import_module("torchtitan.grpo.commands.verify").main(*of),
    "check-gpu": check_gpu,
    "versions": versions,
}
_WITH_JSON = ("check-config", "plan", "evaluate", "verify")  # They put what they find into a dict.


def main() -> None:
    outlive_readers()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    name, rest = (arguments[0] if arguments else ""), arguments[1:]
    if name in _HELP:
        print(USAGE)
        return 0
    if name == "--version":
        print(f"torchtitan-grpo {version()}")
        return 0
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}\n" if name else "", USAGE, sep="", file=sys.stderr)
        return 2
    is_help = "--help" in rest or "-h" in rest
    if name in ("train", "sft", "check-config") and is_help:
        with without_torch():
            from torchtitan.grpo.config.command_line.help_page import help_words, page
            from torchtitan.grpo.config.job_config import JobConfig
        print(page(JobConfig, help_words(rest) or []))
        return 0
    is_json = name in _WITH_JSON and JSON_FLAG in rest and not is_help
    rest = [word for word in rest if not is_json or word != JSON_FLAG]
    with json_object(name) if is_json else nullcontext({}) as found:
        try:
            status = COMMANDS[name](rest, *[found] * (name in _WITH_JSON))
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            found["error"], status = str(error), error.exit_status or 2
        found["ok"] = status == 0
    return status
