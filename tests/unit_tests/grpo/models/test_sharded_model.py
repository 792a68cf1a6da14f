"""The sharded model is the Hugging Face model, with layouts and kernels beyond `test_families.py`."""

import pytest
import torch

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3], [4, 3, 2, 1, 0, 11, 12], [9, 8, 7, 6]]
ROWS = [[0, 1], [2, 3], [], []]


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
    ("kind", "num_ranks", "layout"),
    [
        ("llama", 2, {"dp_replicate": 2}),
        ("llama", 4, {"dp_shard": 2, "tp": 2}),
        ("qwen3", 1, {"attention": "varlen", "ac": "full"}),
        ("qwen3_tied", 2, {"attention": "varlen", "tp": 2}),
        ("llama", 2, {"attention": "varlen", "cp": 2}),
        ("llama", 2, {"attention": "varlen", "dp_shard": 2, "ac": "selective op"}),
    ],
)
def test_sharded_model_equals_hugging_face(kind, num_ranks, layout, make_model, run_ranks):
    # Tensor parallelism cannot compute with a feed-forward that does not divide.
    model, folder = make_model(kind, intermediate_size=78)
    expected, grad_norm = reference(model)
    results = run_ranks(
        "sharded_model", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES, rows=ROWS,
        layout=layout,
    )  # fmt: skip
    num_data_ranks = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)
    for result in results:
        scored = torch.tensor(result["logprobs"])[torch.tensor(result["mask"])]
        torch.testing.assert_close(scored, torch.cat(expected), atol=1e-5, rtol=1e-5)
        # Gradients are summed over ranks, and here every rank had all rows.
        assert result["grad_norm"] == pytest.approx(num_data_ranks * grad_norm, rel=1e-4)


def test_the_output_layer_multiplies_in_the_dtype_of_mixed_precision(make_model, run_ranks):
    _, folder = make_model("qwen3", intermediate_size=78)
    common = {"model": folder, "seq_len": 12, "sequences": SEQUENCES, "rows": ROWS}

    def scored(num_ranks: int, **layout: int) -> list[list[float]]:
        mixed = {**layout, "precision": "bfloat16"}
        (result, *_) = run_ranks("sharded_model", num_ranks, layout=mixed, **common)
        assert result["operands"] == ["torch.bfloat16"]
        return result["logprobs"]

    whole = scored(1)
    assert scored(2, dp_replicate=2) == scored(2, dp_shard=2) == whole, "rounded in the same places"
    by_tensor = torch.tensor(scored(2, tp=2))
    torch.testing.assert_close(by_tensor, torch.tensor(whole), atol=0.02, rtol=0)
