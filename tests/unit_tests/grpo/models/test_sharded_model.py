"""The sharded model is the Hugging Face model: logprobs, gradients, gathering, export."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2, 3], [], []]
# No size divides evenly, and heads x head_dim is not the hidden size where that is allowed.
COMMON = {
    "vocab_size": 61,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 77,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def make_model(kind: str):
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(hidden_size=48, tie_word_embeddings=False, **COMMON)
        return LlamaForCausalLM(config)
    tied = kind == "qwen3_tied"
    config = Qwen3Config(hidden_size=50, head_dim=16, tie_word_embeddings=tied, **COMMON)
    return Qwen3ForCausalLM(config)


def reference(model) -> tuple[list[torch.Tensor], float]:
    """Logprobs of each sequence's trained tokens, scored one by one, and the grad norm."""
    logprobs = []
    for ids in SEQUENCES:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        logprobs.append(picked[1:])  # the first two tokens are the prompt
    torch.cat(logprobs).sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return [x.detach() for x in logprobs], float(norm)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "replicate"),
    [("qwen3", 1, 1), ("qwen3", 2, 1), ("qwen3_tied", 2, 1), ("llama", 2, 1), ("qwen3", 4, 2)],
)
def test_sharded_model_equals_hugging_face(kind, num_ranks, replicate, run_ranks, tmp_path):
    model = make_model(kind)
    model.save_pretrained(tmp_path / "model")
    expected, grad_norm = reference(model)
    results = run_ranks(
        "sharded_model", num_ranks, model=str(tmp_path / "model"), seq_len=12,
        sequences=SEQUENCES, rows=ROWS, replicate=replicate, bucket_bytes=20_000,
        export=str(tmp_path / "export"),
    )  # fmt: skip
    for result in results:
        assert result["num_buckets"] > 2
        assert result["gathered_equal"]
        assert result["reference_equal"]
        assert not result["reference_trains"]
        scored = torch.tensor(result["logprobs"])[torch.tensor(result["mask"])]
        torch.testing.assert_close(scored, torch.cat(expected), atol=1e-5, rtol=1e-5)
        # Gradients are summed over ranks, and here every rank had all rows.
        assert result["grad_norm"] == pytest.approx(num_ranks * grad_norm, rel=1e-4)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for (name, ours), theirs in zip(
        exported.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
