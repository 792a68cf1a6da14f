"""Runs a program of this folder on every rank; see the fixture `run_ranks`."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from torchtitan.grpo.system.device import settle_device


def main() -> int:
    import torch.distributed as dist

    name, output, arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.main(json.loads(arguments))
    Path(output, f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    settle_device()
    from torchtitan.grpo.start.entry import leave

    leave(main)
