# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What a client's program answers to a message of the model."""

import json
from typing import Any

MORE = {"role": "user", "content": "8"}


def replies(message: Any) -> list[dict[str, Any]]:
    """Returns the sums that tool calls ask for, or another question if there are no calls."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": str(sum(json.loads(call.function.arguments).values())),
        }
        for call in message.tool_calls or []
    ] or [MORE]
