# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The server's side of `nccl.py`, on the second GPU: it receives once, and then stands still."""

import json
import sys
import time

import torch

from check_gpu.nccl import NUM_BYTES
from torchtitan.grpo.weight_wire.receiving import WeightGroup
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

# The other side kills this process long before.
_STANDING_SECONDS = 90.0


def main(info: WeightGroupInfo) -> None:
    """Joins the group and receives one broadcast."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    group = WeightGroup(info)
    group.receive(torch.empty(NUM_BYTES, dtype=torch.uint8, device=device), device)
    time.sleep(_STANDING_SECONDS)


if __name__ == "__main__":
    main(WeightGroupInfo(**json.loads(sys.argv[1])))
