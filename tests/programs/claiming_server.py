# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""An embedded server that claims to be a process on a GPU with another NCCL than the trainer's.

    claiming_server.py FACTS ARGUMENT ...

FACTS is a JSON object with the fields of `GroupFacts`; the arguments are those of the server.
"""

import json
import sys

from torchtitan.grpo.inference.embedded import __main__ as embedded
from torchtitan.grpo.weight_wire.group_facts import facts_from_json

if __name__ == "__main__":
    claimed = facts_from_json(json.loads(sys.argv.pop(1)))
    embedded.own_group_facts = lambda device: claimed
    embedded.main()
