# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Messages that rank 0 and the rollout process exchange over ZeroMQ.

The first frame is a msgpack header. A batch has a second one, the arrays of its groups (:mod:`.codec`).
"""

import msgspec

from torchtitan.grpo.rollout.ledger import CloseReason
from torchtitan.grpo.rollout.results import EvaluationResult
from torchtitan.grpo.types import BatchPart, PromptProgress, ServerInfo

CONFIG_FILE = "config.json"
MESSAGES_SOCKET = "messages"
NOTICES_SOCKET = "notices"
SERVERS_SOCKET = "servers"
"""Names of files in the private directory that both processes share."""


class NextBatch(msgspec.Struct, tag=True):
    """Requests the batch that turns ``version`` into ``version + 1``, or its next part."""

    version: int


class Evaluate(msgspec.Struct, tag=True):
    request_id: int
    version: int
    pinned: list[str] = []


class Save(msgspec.Struct, tag=True):
    """Requests to save rollouts for checkpoint ``version``. ``kept`` are checkpoints that still exist."""

    version: int
    kept: list[int]


class Stop(msgspec.Struct, tag=True):
    pass


class VersionServed(msgspec.Struct, tag=True):
    """The weight pusher has attested that the server at ``url`` serves ``version``, and for how long it has paused."""

    url: str
    version: int
    pause_seconds: float = 0.0


class ServerLost(msgspec.Struct, tag=True):
    url: str
    reason: str


class ServerAsleep(msgspec.Struct, tag=True):
    """The lent server at ``url`` has given its devices back."""

    url: str


class RereadUrls(msgspec.Struct, tag=True):
    """Requests that ``inference.urls_file`` is read now."""


class DevicesFree(msgspec.Struct, tag=True):
    """All ranks have made room on their devices, which are lent until the batch of ``version``."""

    version: int


class Ready(msgspec.Struct, tag=True):
    """The servers are up, the prompts are opened, and the reward functions are checked."""

    servers: list[ServerInfo]
    fetch_endpoint: str | None = None
    warnings: list[str] = []


class Fatal(msgspec.Struct, tag=True):
    message: str


class Progress(msgspec.Struct, tag=True):
    """What a batch or evaluation waits for. ``is_stuck``: no server is ready, so nothing happens.

    ``line`` tells users the progress: ``done`` of ``wanted`` completions are finished.
    """

    message: str
    is_stuck: bool = False
    line: str = ""
    done: int = 0
    wanted: int = 0


class DevicesWanted(msgspec.Struct, tag=True):
    """Asks for the devices of lent servers while rank 0 waits for the batch of ``version``.

    Nothing of that batch has been sent yet. The answer is :class:`DevicesFree`.
    """

    version: int


class Announcement(msgspec.Struct, tag=True):
    text: str
    is_warning: bool = True


class Dropped(msgspec.Struct, tag=True):
    """Counts of what this process has dropped so far, by the kinds of :mod:`.drops`."""

    counts: dict[str, int]


class Saved(msgspec.Struct, tag=True):
    """Answer to :class:`Save`. ``num_rollouts`` is None if the completions could not be written."""

    version: int
    num_rollouts: int | None


class EvaluationDone(msgspec.Struct, tag=True):
    request_id: int
    result: EvaluationResult


class Batch(msgspec.Struct, tag=True):
    """Answer to :class:`NextBatch`. ``groups`` is a packed header, whose arrays follow in a second frame.

    ``progress``, ``closed``, ``metrics`` and ``rows`` are valid only in the part that ends a batch.
    """

    version: int
    progress: PromptProgress
    closed: dict[int, CloseReason]
    metrics: dict[str, float]
    groups: msgspec.Raw
    part: BatchPart
    rows: dict[int, str] = {}


Command = NextBatch | Evaluate | Save | Stop
Notice = VersionServed | ServerLost | ServerAsleep | RereadUrls | DevicesFree
Answer = (
    Ready
    | Fatal
    | Progress
    | DevicesWanted
    | Announcement
    | Dropped
    | Batch
    | Saved
    | EvaluationDone
)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
# The socket of servers carries the list of all servers after each change.
decode_servers = msgspec.msgpack.Decoder(list[ServerInfo]).decode
