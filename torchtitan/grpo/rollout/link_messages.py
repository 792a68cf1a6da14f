# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What rank 0 and the rollout process say to each other over ZeroMQ.

A message is a list of frames: a msgpack header, and for a batch the token ids and
logprobs as raw arrays behind it. Arrays that come in are views of the received frames,
and so read-only.
"""

import msgspec

from torchtitan.grpo.rollout import group_frames
from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.types import BatchPart, PromptProgress, ServerInfo

CONFIG_FILE = "config.json"
MESSAGES_SOCKET = "messages"
NOTICES_SOCKET = "notices"
SERVERS_SOCKET = "servers"
"""Files in the private directory that both sides share."""


class NextBatch(msgspec.Struct, tag=True):
    """Rank 0 asks for the batch that turns ``version`` into ``version + 1``, or its next part."""

    version: int


class Evaluate(msgspec.Struct, tag=True):
    """Rank 0 asks for the held-out score of ``version``."""

    request_id: int
    version: int


class Save(msgspec.Struct, tag=True):
    """Rank 0 has written the checkpoint of ``version``: keep what goes with it.

    ``kept`` are the steps whose checkpoints are still there.
    """

    version: int
    kept: list[int]


class Stop(msgspec.Struct, tag=True):
    """Rank 0 ends the rollout process."""


class VersionServed(msgspec.Struct, tag=True):
    """The weight pusher has attested that the server at ``url`` serves ``version``."""

    url: str
    version: int


class ServerLost(msgspec.Struct, tag=True):
    """The weight pusher has lost the server at ``url``."""

    url: str
    reason: str


class RereadUrls(msgspec.Struct, tag=True):
    """The user asks to have ``inference.urls_file`` read now."""


class Ready(msgspec.Struct, tag=True):
    """Servers are up, prompts read, rewards checked.

    ``fetch_endpoint`` is where ranks fetch their rollouts, with
    ``prompts.single_rank_load = false``. ``warnings`` are for the user.
    """

    servers: list[ServerInfo]
    fetch_endpoint: str | None = None
    warnings: list[str] = []


class Fatal(msgspec.Struct, tag=True):
    """The rollout process ends; ``message`` says why, for the user."""

    message: str


class Progress(msgspec.Struct, tag=True):
    """What a batch or an evaluation that is being waited for still lacks."""

    message: str


class EvaluationDone(msgspec.Struct, tag=True):
    """Answer to the :class:`Evaluate` command that has the same ``request_id``."""

    request_id: int
    result: EvaluationResult


class Batch(msgspec.Struct, tag=True):
    """Answer to :class:`NextBatch`; four frames follow, see :func:`group_frames.pack_groups`.

    Those of token ids and logprobs are empty where ranks fetch them themselves. Of a batch in
    parts ``progress``, ``closed`` and ``metrics`` count with the last one only.
    """

    version: int
    progress: PromptProgress
    closed: dict[int, CloseReason]
    metrics: dict[str, float]
    groups: list[group_frames.GroupHeader]
    part: BatchPart = BatchPart.WHOLE


Command = NextBatch | Evaluate | Save | Stop
Notice = VersionServed | ServerLost | RereadUrls
Answer = Ready | Fatal | Progress | Batch | EvaluationDone

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
# What the servers' socket carries: all servers, after each change.
decode_servers = msgspec.msgpack.Decoder(list[ServerInfo]).decode
