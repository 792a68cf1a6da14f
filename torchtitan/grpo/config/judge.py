# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The ``[reward.judge]`` table: a model that judges completions."""

import string
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torchtitan.grpo.config.bounds import above, at_least
from torchtitan.grpo.system.files import read_regular


@dataclass
class Judge:
    """``[reward.judge]``: the model that the built-in reward function ``judge`` asks.

    Name ``judge`` in ``reward.functions``, in ``evaluation.function``, or in both. One request is
    sent for each completion. docs/how-to/judges.md shows a run.
    """

    kind: Literal["chat", "score"] = "chat"
    """How the judge answers. ``chat`` is a language model on any server with OpenAI's route
    ``/chat/completions``; its answer contains the score as a number. ``score`` is a reward model with
    one output, on vLLM or SGLang (route ``/classify``); its output is the score."""

    url: str | None = None
    """Base URL of the server. With ``kind = "chat"`` it usually ends in ``/v1``, as in
    ``http://host:8000/v1`` or ``https://api.openai.com/v1``; with ``kind = "score"`` it is
    ``http://host:8000``."""

    model: str = ""
    """Name of the model on the server. Required with ``kind = "chat"``."""

    template: str = ""
    """Text that is sent for each completion, or the path of a file that contains it. ``{prompt}``,
    ``{completion}`` and the columns of the data set, such as ``{answer}``, are inserted; other
    braces are doubled. Required. For ``kind = "score"`` it is the whole text in the chat format of
    the reward model."""

    score: str = ""
    """Regular expression whose first group is the score in the answer of a ``chat`` judge, such as
    ``Score: (\\d+)``. Its last match counts. If it is empty, the score is the number behind the
    last ``Score:``, or, without such a mark, the last line if it holds nothing else, such as ``8/10``
    and ``8 out of 10``, which are 8 (docs/how-to/judges.md). The last 65,536 characters are searched."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as ``{ temperature = 0.0, max_tokens = 1024 }``."""

    retries: Annotated[int, at_least(0)] = 2
    """Number of further requests if the server does not answer, or if its answer contains no score.
    A completion whose last answer contains none is left out as unscored. If the server does not
    answer, the whole group is scored again later."""

    timeout_seconds: Annotated[
        float, above(0).or_value(0, "reward.timeout_seconds / (retries + 1)")
    ] = 0.0
    """Maximum time for one request, at most ``reward.timeout_seconds``, which limits all requests
    of a group together."""

    max_concurrent: Annotated[int, at_least(1)] = 64
    """Maximum number of requests that each worker sends at once. Further ones wait, within
    ``reward.timeout_seconds``. A group of 8 completions sends 8."""

    api_key_variable: str | None = None
    """Name of the environment variable that contains the key of the server. It must also be named
    in ``workers.pass_variables``. With None, no key is sent."""


def template_text(judge: Judge) -> str:
    """Returns the text of ``judge.template`` or of the file it names; ValueError for an unusable template."""
    text = judge.template
    if "{" not in text and "\n" not in text:
        try:
            text = read_regular(text).decode()
        except (OSError, ValueError) as error:
            raise ValueError(
                "reward.judge.template must contain {completion}, or be the path of a text file that "
                f"does, got {text!r}: {error}."
            ) from error
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(
            f"reward.judge.template must double braces that name nothing: {error}."
        ) from error
    if "completion" not in names:
        raise ValueError(
            "reward.judge.template must contain {completion}, or all completions would be the same to "
            f"the judge, got {text!r:.200}."
        )
    return text
