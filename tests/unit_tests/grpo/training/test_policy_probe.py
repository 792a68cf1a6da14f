"""The probe rates fixed tokens at temperature 1, in rows that the layout can run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.packed_model import LogprobHead, ScoringSettings
from torchtitan.grpo.training.policy_probe import PolicyProbe, probe_shape
from torchtitan.grpo.training.runner import ForwardRunner

TOKENS = [3, 1, 4, 1, 5]


class Table(ForwardRunner):
    """Scores each label by the token before it, through the output layer."""

    has_output = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.head = LogprobHead(
            nn.Linear(8, 9, bias=False),
            ScoringSettings("sdpa", False, 0.5, 4, False, trains_entropy=False, keep_logits=False),
        )

    @torch.no_grad()
    def forward(self, rows: Any) -> torch.Tensor:
        with self.head.labeled(rows.labels):
            return self.head(self.embed(rows.tokens))


def probe(runner: Table, is_speaker: bool) -> PolicyProbe:
    feed: Any = SimpleNamespace(all_reduce_sum=lambda values: values)
    return PolicyProbe(runner, [runner.head], feed, TOKENS, (2, 8), torch.device("cpu"), is_speaker)


def test_tokens_are_rated_at_temperature_one_and_the_temperature_comes_back():
    runner = Table()
    found = probe(runner, is_speaker=True).logprobs()
    logits = runner.embed(torch.tensor(TOKENS[:-1])) @ runner.head.weight.T
    expected = logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)
    assert runner.head.temperature == 0.5


@pytest.mark.parametrize(
    ("rows", "seq_len", "has_pipeline", "is_compiled", "divisor", "attention", "shape"),
    [
        (4, 256, False, False, 1, "sdpa", (1, 48)),
        (4, 256, False, False, 20, "sdpa", (1, 60)),
        (4, 256, True, False, 2, "sdpa", (1, 256)),
        (4, 256, False, True, 2, "sdpa", (4, 256)),
        # Flex attention is not compiled for a shape of the probe.
        (2, 4096, False, False, 1, "flex", (2, 4096)),
        (2, 4096, False, False, 1, "varlen", (1, 48)),
    ],
)
def test_only_models_of_one_shape_rate_in_the_shape_of_training(
    rows, seq_len, has_pipeline, is_compiled, divisor, attention, shape
):
    config = JobConfig()
    config.training.local_batch_size, config.training.seq_len = rows, seq_len
    config.compile.enable = is_compiled
    dims: Any = SimpleNamespace(pp_enabled=has_pipeline, seq_len_divisor=divisor)
    assert probe_shape(config, dims, 48, attention) == shape
