# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Finds out whether a vLLM server was started with the options that a run needs.

Each option is recognized by how a route behaves, because ``/server_info`` takes half a minute.
"""

import re
from dataclasses import asdict, dataclass, field

from torchtitan.grpo.inference.http import HttpConnection, excerpt
from torchtitan.grpo.inference.vllm.answers import GENERATE_ROUTE
from torchtitan.grpo.weight_wire.transfer_messages import WeightGroupInfo

GUARD = "torchtitan.grpo.inference.vllm.guard.VllmGuard"
"""Class that vLLM puts before its HTTP routes."""

NO_ROOM = "no room to stage"
"""Part of the error message of a worker without memory for a second copy of the weights."""

NO_DEV_MODE = "its environment lacks VLLM_SERVER_DEV_MODE=1, so that weights cannot be pushed"
NO_SCALE_OUT = "it was started without --enable-scale-out, so that it takes no token ids"
NO_TRANSFER = (
    'it was started without --weight-transfer-config \'{"backend": "torchtitan_grpo"}\' (or its '
    "environment lacks this project's plugin), so that weights cannot be pushed"
)
WRONG_LOGPROBS = (
    "it was started without --logprobs-mode processed_logprobs, so that its logprobs are those "
    "before rollout.temperature"
)
NO_GUARD = (
    "its routes for weights and for /collective_rpc ask for no key. Start it with --middleware "
    f"{GUARD} and the keys in its environment, as scripts/serve_vllm.sh does"
)
ALL_OPTIONS = (
    "a command of your own needs all of VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --logprobs-mode "
    'processed_logprobs and --weight-transfer-config \'{"backend": "torchtitan_grpo"}\''
)

_OUTSIDE_VOCABULARY = 2**31 - 1
_VOCABULARY = re.compile(r"[Vv]ocabulary size: (\d+)")
_MISSING = (404, 405)
# vLLM answers 400 or 500 if its weight transfer engine refuses.
_REFUSED = (400, 404, 405, 500)


@dataclass
class Examined:
    """What was found out; ``can_generate`` tells whether the route for token ids is open."""

    vocab_size: int | None = None
    can_generate: bool = True
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


async def examine(http: HttpConnection) -> Examined:
    """Looks for the options of a vLLM server without changing it."""
    found = Examined()
    # Refused before it is generated: the refusal tells the size of the vocabulary.
    bias = {str(_OUTSIDE_VOCABULARY): 1.0}
    sampling = {"max_tokens": 1, "logit_bias": bias, "detokenize": False}
    body = {"token_ids": [0], "stream": False, "sampling_params": sampling}
    answer = await http.post(GENERATE_ROUTE, body, scope="generation", accept=(400, 403, 404))
    size = _VOCABULARY.search(excerpt(answer.body))
    if answer.status == 400 and size is not None:
        found.vocab_size = int(size[1])
    elif answer.status in (403, 404):
        found.can_generate = False
        found.problems.append(NO_SCALE_OUT)
    if (await http.get("/weight_info", accept=_MISSING)).status != 200:
        found.problems.append(NO_DEV_MODE)
    else:
        if http.has_keys:
            unasked = await http.get("/weight_info", scope="public", accept=(*_MISSING, 401, 403))
            if unasked.status == 200:
                found.warnings.append(NO_GUARD)
        # A probe for room joins no group; see the plugin's engine.
        probe = asdict(WeightGroupInfo("", 0, 0, 0, "", "gloo", 1.0)) | {"probe": True}
        route = "/init_weight_transfer_engine"
        answer = await http.post(route, {"init_info": probe}, accept=_REFUSED)
        if answer.status != 200 and NO_ROOM not in (text := excerpt(answer.body)):
            found.problems.append(f"{NO_TRANSFER} ({route} answered: {text[:200]})")
    return found
