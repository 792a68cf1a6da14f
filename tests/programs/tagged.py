# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A tiny model whose versions and parameters can all be told apart.

Version ``v`` of a parameter is its first value times a factor that follows from ``v`` and the
parameter's name. So whoever knows the first values knows all versions bit by bit, and a
mixture of versions, slots or buckets is none of them.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from torchtitan.grpo.weight_wire.checksum import tensor_checksum

VOCAB_SIZE = 320
UNPUSHED = -1
"""The version of a server that was never pushed to: the factors are 1."""

_KEPT_VERSIONS = 16


def make_model(seed: int, **sizes: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{"vocab_size": VOCAB_SIZE, "head_dim": 32, "max_position_embeddings": 2048, **sizes},
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=1,
        initializer_range=0.08,  # large enough for weights to matter
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def save_model(directory: Path, model: Qwen3ForCausalLM | None = None) -> None:
    if model is None:
        model = make_model(
            0, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512,
        )  # fmt: skip
    model.save_pretrained(directory)
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}  # SGLang warms up on a text
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(directory)


def factor(name: str, version: int) -> float:
    """Returns the factor of a parameter in [0.75, 1.25), exact in float32."""
    if version == UNPUSHED:
        return 1.0
    drawn = hashlib.blake2b(f"{name} {version}".encode(), digest_size=4).digest()
    return 0.75 + int.from_bytes(drawn, "big") % 2**20 / 2**21


class TaggedModel:
    def __init__(self, directory: str | Path) -> None:
        self.first = load_file(Path(directory) / "model.safetensors")
        self._model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._loaded: int | None = None
        self._checksums: OrderedDict[int, dict[str, int]] = OrderedDict()

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        return {name: first * factor(name, version) for name, first in self.first.items()}

    def checksums(self, version: int) -> dict[str, int]:
        if version not in self._checksums:
            tensors = self.tensors(version).items()
            self._checksums[version] = {name: tensor_checksum(t) for name, t in tensors}
            while len(self._checksums) > _KEPT_VERSIONS:
                self._checksums.popitem(last=False)
        return self._checksums[version]

    def digest(self, version: int) -> str:
        return digest_of(self.checksums(version).items())

    @torch.no_grad()
    def logprobs(self, version: int, tokens: Sequence[int], num_given: int = 1) -> list[float]:
        if self._loaded != version:
            self._model.load_state_dict(self.tensors(version))
            self._loaded = version
        ids = torch.tensor([list(tokens)])
        logprobs = torch.log_softmax(self._model(ids).logits[0, num_given - 1 : -1], -1)
        return logprobs.gather(-1, ids[0, num_given:, None])[:, 0].tolist()

    def sample_error(self, sample: dict) -> float:
        tokens = sample["prompt"] + sample["ids"]
        errors = [0.0]
        for version, start, end in sample["segments"]:
            expected = self.logprobs(version, tokens, len(sample["prompt"]))[start:end]
            served = sample["logprobs"][start:end]
            errors += [abs(e - s) for e, s in zip(expected, served, strict=True)]
        return max(errors)


def digest_of(checksums: Iterable[tuple[str, int]]) -> str:
    return hashlib.sha256(repr(sorted(checksums)).encode()).hexdigest()
