# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Describes a bucket of adapters to an SGLang server, in the place of the name of a load format.

SGLang's route has no other field that its code hands to the scheduler as it is.
"""

import json
from dataclasses import asdict, dataclass

_PREFIX = "torchtitan_grpo.adapters:"
PROBE = f"{_PREFIX}probe"
"""In place of a note: asks whether the server understands notes. Nothing is received."""
READY = "torchtitan_grpo adds adapters to the base weights here."
"""Message with which a server that understands notes answers :data:`PROBE`."""


@dataclass(frozen=True)
class AdapterNote:
    """Further facts about a bucket of adapters beside names, dtypes and shapes; ``index`` is from 0."""

    index: int
    is_last: bool
    lora_scale: float
    lora_base: str

    def as_load_format(self) -> str:
        return _PREFIX + json.dumps(asdict(self), allow_nan=False)


def note_of(load_format: str | None) -> AdapterNote | None:
    if load_format is None or not load_format.startswith(_PREFIX):
        return None
    try:
        return AdapterNote(**json.loads(load_format.removeprefix(_PREFIX)))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"load_format must hold a note of this release of torchtitan-grpo ({error}), got "
            f"{load_format[:200]!r}. Install the same release beside trainer and server."
        ) from error
