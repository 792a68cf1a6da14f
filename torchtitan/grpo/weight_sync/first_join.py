# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Ends a run if a server refuses the first weights, instead of asking the server forever."""

from torchtitan.grpo.inference.client import ServerError

# More than one refusal is allowed, because a server may still be busy with an update that an
# earlier trainer left behind.
_MAX_REFUSALS = 3


class WeightsRefused(RuntimeError):
    """Raised if a server that was present at the start of the run refuses the run's weights."""


class FirstJoin:
    """Counts the refusals of one server until the server has taken a version.

    Later refusals, and refusals by servers that join during the run, count as losses of the server,
    and the run continues with other servers.

    Args:
        url: URL of the server.
        is_initial: Whether the server was present at the start of the run.
    """

    def __init__(self, url: str, *, is_initial: bool) -> None:
        self._url = url
        self._num_left = _MAX_REFUSALS if is_initial else None

    def succeed(self) -> None:
        """Records that the server has taken a version."""
        self._num_left = None

    def fail(self, error: BaseException) -> None:
        """Records that the server was lost.

        Raises:
            WeightsRefused: If the server has refused each of the first pushes.
        """
        if self._num_left is None:
            return
        if not (isinstance(error, ServerError) and error.was_answered):
            self._num_left = _MAX_REFUSALS
            return
        self._num_left -= 1
        if self._num_left == 0:
            raise WeightsRefused(
                f"The server {self._url} must take the weights of this run, but it has refused "
                f"them {_MAX_REFUSALS} times and has never taken any. The last reason: {error} "
                "If that does not say what to change, start the server with the model of "
                "model.hf_assets_path (scripts/serve_vllm.sh, scripts/serve_sglang.sh)."
            ) from error
