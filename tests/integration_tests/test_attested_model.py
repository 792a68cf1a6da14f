# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Wrong tensors in a server of a real model under bfloat16, whose rounding hides most of them.

The server's model and engine are real, and so are the trainer's probe and the tensors that it would send.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build_model import Built, build
from stub_clients import StubClient

from torchtitan.grpo.inference.embedded.model import ModelRunner, load_model
from torchtitan.grpo.inference.embedded.weights import WeightTable
from torchtitan.grpo.models.hf_weights import full_hf_tensors
from torchtitan.grpo.models.shards import local_tensor
from torchtitan.grpo.system.device import settle_device
from torchtitan.grpo.training.policy_probe import PolicyProbe
from torchtitan.grpo.training.runner import WholeModelRunner
from torchtitan.grpo.weight_sync.attestation import (
    Attestation,
    AttestationFailed,
    Probes,
    SentTensors,
    ServerAttestation,
    attested_tokens,
    tolerances_of,
)
from torchtitan.grpo.weight_wire.checksum import tensor_checksum

Tensors = dict[str, torch.Tensor]
BFLOAT16 = torch.bfloat16
LEARNING_RATE = 2e-5


pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not")


class Server(StubClient):
    url = "http://a"

    def __init__(self, folder: str) -> None:
        model = load_model(folder, "cpu", "bfloat16")
        self.runner, self.table = ModelRunner(model, 1, 128), WeightTable(model)
        self.served: int | None = None

    async def version(self) -> int | None:
        return self.served

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        with torch.inference_mode():
            return self.runner.rate([token_ids])[0].logprobs

    async def served_checksums(self, dtype: str) -> dict[str, int] | None:
        assert dtype == "bfloat16"
        return self.table.checksums()


class Trainer:
    """Steps in random directions: Adam moves each weight by about the learning rate."""

    def __init__(self, folder: str) -> None:
        self.built: Built = build(folder, 128, precision="bfloat16", keeps_logits=False)
        vocab_size = self.built.hf_model.vocab_size
        self.tokens = attested_tokens(self.built.config, vocab_size)
        runner, feed = WholeModelRunner(self.built.parts[0], 1), SimpleNamespace()
        feed.all_reduce_sum = lambda values: values
        shape, cpu = (1, len(self.tokens)), torch.device("cpu")
        parts: Any = self.built.parts
        self.probe = PolicyProbe(runner, parts, feed, self.tokens, shape, cpu, is_speaker=True)  # pyright: ignore[reportArgumentType]
        self.random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.built.parts[0].parameters():
            weight = local_tensor(parameter)
            signs = torch.randint(0, 2, weight.shape, generator=self.random) * 2 - 1
            weight.add_(signs, alpha=LEARNING_RATE)

    def sent(self) -> Tensors:
        return dict(full_hf_tensors(self.built.parts, self.built.adapter, BFLOAT16))


class Rig:
    """A trainer and a server that an attestation has seen before the first push."""

    def __init__(self, folder: str) -> None:
        self.trainer, self.server = Trainer(folder), Server(folder)
        self.probes = Probes()
        self.probes.put(0, self.trainer.probe.logprobs())
        self.initial = self.old = self.new = self.trainer.sent()
        self.version = 0

    def push(self) -> None:
        """Takes a step, and gives the server the new weights."""
        self.version += 1
        self.trainer.step()
        self.old, self.new = self.new, self.trainer.sent()
        self.server.served = self.version
        self.probes.put(self.version, self.trainer.probe.logprobs())
        self.plant({})

    def plant(self, wrong: Tensors) -> None:
        self.serve({**self.new, **wrong})

    def serve(self, tensors: Tensors) -> None:
        self.server.table.adopt({name: t.to(BFLOAT16).clone() for name, t in tensors.items()})

    async def attestation(self, *, exact: bool) -> ServerAttestation:
        """Its tolerance is measured before the first push. The server then has the newest weights."""

        async def checksums(version: int) -> dict[str, int]:
            return {name: tensor_checksum(tensor) for name, tensor in self.new.items()}

        limits, sent = tolerances_of(BFLOAT16), SentTensors("bfloat16", checksums)
        common = Attestation(
            1, self.trainer.tokens, self.probes, limits, 30.0, sent if exact else None
        )
        attestation, served = ServerAttestation(common, self.server), self.server.served
        self.server.served = None
        self.serve(self.initial)
        await attestation.observe()
        self.server.served = served
        self.plant({})
        return attestation


@pytest.fixture(scope="module")
def rig(smollm2: Path, only_rank: None) -> Iterator[Rig]:
    settle_device()
    rig = Rig(str(smollm2))
    rig.push()
    yield rig


def layer(number: int, part: str) -> str:
    return f"model.layers.{number}.{part}.weight"


EMBEDDING, DOWN = "model.embed_tokens.weight", layer(15, "mlp.down_proj")
QUERIES, OUTPUTS = layer(15, "self_attn.q_proj"), layer(15, "self_attn.o_proj")
NORM = layer(15, "input_layernorm")


def with_noise(rig: Rig) -> Tensors:
    weight = rig.new[DOWN].float()
    return {DOWN: weight * (1 + 0.01 * torch.randn(weight.shape, generator=rig.trainer.random))}


def with_old_rows(rig: Rig) -> Tensors:
    embedding = rig.new[EMBEDDING].clone()
    embedding[1000:1064] = rig.old[EMBEDDING][1000:1064]
    return {EMBEDDING: embedding}


def swapped_outputs(rig: Rig) -> Tensors:
    other = layer(16, "self_attn.o_proj")
    return {OUTPUTS: rig.new[other], other: rig.new[OUTPUTS]}


# What is wrong, and whether log-probabilities show it.
FAULTS: dict[str, tuple[Callable[[Rig], Tensors], bool]] = {
    "queries of another layer": (
        lambda rig: {QUERIES: rig.new[layer(16, "self_attn.q_proj")]},
        True,
    ),
    "queries of the version before": (lambda rig: {QUERIES: rig.old[QUERIES]}, False),
    "a norm times 1.1": (lambda rig: {NORM: 1.1 * rig.new[NORM].float()}, False),
    "a matrix with 1 % of noise": (with_noise, False),
    "outputs of two layers swapped": (swapped_outputs, True),
    "rows of the embedding shifted by one": (
        lambda rig: {EMBEDDING: rig.new[EMBEDDING].roll(1, 0)},
        True,
    ),
    "64 rows of the embedding of the version before": (with_old_rows, False),
    "the version before": (lambda rig: rig.old, False),
}


@pytest.mark.parametrize("fault", list(FAULTS))
async def test_every_wrong_tensor_is_found_by_its_checksum(rig: Rig, fault: str):
    planted = FAULTS[fault][0](rig)
    # A step moves no element of some norms, whose neighbours in bfloat16 are too far away.
    wrong = [n for n, t in planted.items() if not torch.equal(t.to(BFLOAT16), rig.new[n])]
    attestation = await rig.attestation(exact=True)
    rig.plant(planted)
    with pytest.raises(AttestationFailed, match="bit for bit") as failure:
        await attestation.check(rig.version)
    assert f"of {len(wrong)} of {len(rig.new)} differ" in str(failure.value)
    rig.plant({})
    assert await attestation.check(rig.version)


@pytest.mark.parametrize("fault", list(FAULTS))
async def test_log_probabilities_alone_show_only_what_changes_the_model_by_much(
    rig: Rig, fault: str
):
    make, is_shown = FAULTS[fault]
    attestation = await rig.attestation(exact=False)
    rig.plant(make(rig))
    if is_shown:
        with pytest.raises(AttestationFailed, match="on average"):
            await attestation.check(rig.version)
    else:
        assert await attestation.check(rig.version)


@pytest.mark.parametrize("steps", [5, pytest.param(100, marks=pytest.mark.long)])
async def test_right_weights_pass_step_after_step(rig: Rig, steps: int):
    attestation = await rig.attestation(exact=True)
    for _ in range(steps):
        rig.push()
        assert await attestation.check(rig.version)
