# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs an embedded server that receives the tensors of any checkpoint and generates nothing.

    python benchmarks/push_receiver.py --model-path DIR --port 30000 ...

The arguments, routes, process groups, staging and checksums are those of the embedded server. Only
the table of parameters differs: it holds the tensors of the directory's files under their own
names, while transformers keeps the experts of a layer fused in one parameter.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from torchtitan.grpo.inference.embedded import __main__ as embedded
from torchtitan.grpo.inference.embedded.weights import WeightTable


class FileTensors(torch.nn.Module):
    """A module that holds the tensors of a directory's safetensors files."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            self._tensors |= {name: t.to(dtype) for name, t in load_file(file).items()}

    def state_dict(self, *_: object, **__: object) -> dict[str, torch.Tensor]:
        """Returns the tensors, not copies of them."""
        return self._tensors


def main() -> None:
    path = Path(embedded.parse_arguments(sys.argv[1:]).model_path)
    # No other part of the server knows the names of a model's parameters.
    embedded.WeightTable = lambda model: WeightTable(FileTensors(path, model.dtype))
    embedded.main()


if __name__ == "__main__":
    main()
