# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A node whose store, on the node of the endpoint, ends before it. Prints that it was lost."""

# ruff: noqa: E402  (the package must be put in place first)

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torchtitan/grpo/system"))
from light_start import install_bare_package  # as the launcher's own process begins

install_bare_package()
from torchtitan.grpo.start import node

node.import_torch_quietly()
from torch.distributed import DistNetworkError, TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
client.set("key", "value")
del store
try:
    client.get("key")
except DistNetworkError:
    print(f"lost, TORCH_CPP_LOG_LEVEL is {os.environ.get('TORCH_CPP_LOG_LEVEL')}")
