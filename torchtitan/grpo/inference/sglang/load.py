# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The load of an SGLang or embedded server, read from its answer to ``/v1/loads``.

The route needs no server flag, and no other key than generation.
"""

from typing import Any

from torchtitan.grpo.inference.client import ServerError, ServerLoad
from torchtitan.grpo.inference.http import excerpt
from torchtitan.grpo.inference.loads import checked_load, to_number


def parse_loads(source: str, body: Any) -> ServerLoad:
    """Returns the load from the body of ``/v1/loads``, which has one entry for each rank.

    Raises:
        ServerError: If a field is missing, or no rank has reported yet.
    """
    try:
        ranks = body["loads"]
        return checked_load(
            source,
            [to_number(rank["num_running_reqs"]) for rank in ranks],
            [to_number(rank["num_waiting_reqs"]) for rank in ranks],
            [to_number(rank["token_usage"]) for rank in ranks],
        )
    except (KeyError, TypeError) as error:
        raise ServerError(
            f"{source} must answer loads with num_running_reqs, num_waiting_reqs and token_usage "
            f"({type(error).__name__}: {error}), got {excerpt(body)}"
        ) from error
