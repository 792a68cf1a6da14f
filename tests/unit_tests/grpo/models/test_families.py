"""Every family is its Hugging Face model, in one process and in every kind of layout."""

from typing import Any

import pytest
import torch
from hf_reference import ROWS, SEQUENCES, reference
from safetensors.torch import save_file

FAMILIES = ["llama", "llama_tied", "mistral", "qwen2", "qwen2_tied", "qwen3_tied", "qwen3_mixed"]
# Each family meets each of these in one start of so many ranks.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "fsdp2": {"dp_shard": 2},
        "tp2": {"tp": 2},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2, "schedule": "1F1B"},
        "pp2 in a V": {"pp": 2, "schedule": "ZBVZeroBubble"},
    },
    4: {
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp2 pp2": {"dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B"},
        "tp2 pp2": {"tp": 2, "pp": 2, "schedule": "VHalf"},
    },
}


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        # Two families with all parts of a model stand for all where there are several ranks.
        pytest.param(
            kind,
            num_ranks,
            marks=[pytest.mark.long]
            if num_ranks > 1 and kind not in ("qwen2_tied", "qwen3_mixed")
            else [],
        )
        for kind in FAMILIES
        for num_ranks in LAYOUTS
    ],
)
def test_logprobs_gradients_and_norm_are_hugging_faces(
    kind: str, num_ranks: int, make_model, run_ranks, tmp_path
):
    # Four stages need two layers each, and tensor parallelism a width that divides.
    model, folder = make_model(kind, num_hidden_layers=8, intermediate_size=78)
    logprobs, gradients = reference(model)
    save_file(gradients, tmp_path / "gradients.safetensors")
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    results = run_ranks(
        "family_layouts", num_ranks, model=folder, seq_len=12, sequences=SEQUENCES, rows=ROWS,
        gradients=str(tmp_path / "gradients.safetensors"), layouts=LAYOUTS[num_ranks],
    )  # fmt: skip
    for name in LAYOUTS[num_ranks]:
        held = {key for result in results for key in result[name]["gradient_errors"]}
        assert len(held) >= 8 * 9 + 2, "the ranks together hold the whole model"
        scored = [result[name]["logprobs"] for result in results]
        assert any(scored), name
        for result in (result[name] for result in results):
            if result["logprobs"] is not None:
                found = torch.tensor(result["logprobs"])
                torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=1e-5, msg=name)
            wrong = {k: e for k, e in result["gradient_errors"].items() if not e < 2e-5}
            assert not wrong, name
            assert result["norm"] == pytest.approx(norm, rel=1e-5), name
