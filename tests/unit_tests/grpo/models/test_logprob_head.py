"""The output layer that returns log-probabilities, alone and under every kind of layout."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.models.packed_model import (
    LogprobHead,
    ScoredTokens,
    ScoringSettings,
    replace_output,
)
from torchtitan.grpo.training.model_spec import scoring_settings

SETTINGS = ScoringSettings(
    "sdpa", False, 0.8, 2, with_entropy=True, trains_entropy=True, keep_logits=False
)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(31, 8)
        self.output = nn.Linear(8, 31, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight


def test_it_scores_the_labels_of_its_context():
    torch.manual_seed(0)
    head = LogprobHead(nn.Linear(8, 31, bias=False), SETTINGS)
    hidden = torch.randn(2, 5, 8)
    labels, others = torch.randint(0, 31, (2, 2, 5))
    log_p = (hidden @ head.weight.T / 0.8).log_softmax(-1)
    with head.labeled(labels):
        with head.labeled(others):
            inner = head(hidden)
        outer = head(hidden)
    assert outer.shape == (2, 5, 2) and outer.dtype == torch.float32
    for packed, of in ((inner, others), (outer, labels)):
        torch.testing.assert_close(packed[..., 0], log_p.gather(-1, of[..., None])[..., 0])
        torch.testing.assert_close(packed[..., 1], -(log_p.exp() * log_p).sum(-1))


def test_tokens_that_are_not_scored_cost_nothing_and_are_zero():
    torch.manual_seed(0)
    head = LogprobHead(nn.Linear(8, 31, bias=False), SETTINGS)
    hidden, labels = torch.randn(2, 5, 8), torch.randint(0, 31, (2, 5))
    mask = torch.tensor([[False, True, True, False, False], [False, False, False, False, True]])
    hidden[~mask] = torch.nan
    hidden.requires_grad_()
    positions = ScoredTokens(mask, mask).positions(lambda whole: whole)
    assert positions is not None and positions.tolist() == [1, 2, 9]
    with head.labeled(labels, positions), FlopCounterMode(display=False) as flops:
        packed = head(hidden)
        packed.sum().backward()
    # Logits twice, because none are kept, and two gradients.
    assert flops.get_total_flops() == 4 * 2 * 3 * 31 * 8
    log_p = (hidden[mask] @ head.weight.T / 0.8).log_softmax(-1)
    torch.testing.assert_close(packed[mask][:, 0], log_p.gather(-1, labels[mask][:, None])[:, 0])
    assert not packed[~mask].any() and hidden.grad is not None and not hidden.grad[~mask].any()
    assert hidden.grad[mask].all() and head.weight.grad is not None
    assert head.weight.grad.isfinite().all()


def test_missing_labels_and_a_layer_of_another_kind_are_refused():
    head = LogprobHead(nn.Linear(8, 31, bias=False), SETTINGS)
    with pytest.raises(KeyError), head.labeled(torch.zeros(1, 5, dtype=torch.int64)):
        raise KeyError
    with pytest.raises(RuntimeError, match="labeled"):
        head(torch.zeros(1, 5, 8))
    model = Tied()
    model.output = nn.Linear(8, 31)
    with pytest.raises(ValueError, match="without bias"):
        replace_output(model, SETTINGS)


@pytest.mark.parametrize("tied", [True, False])
def test_replacing_keeps_the_parameter_its_name_and_tying(tied):
    with torch.device("meta"):
        model = Tied(tied)
    weight, keys = model.output.weight, list(model.state_dict())
    replace_output(model, SETTINGS)
    assert isinstance(model.output, LogprobHead) and model.output.weight is weight
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    assert list(model.state_dict()) == keys
    # Upstream's pipeline split copies the model for each stage.
    copied = copy.deepcopy(model)
    assert (copied.output.weight is copied.tok_embeddings.weight) == tied


@pytest.mark.parametrize(("num_ranks", "degree"), [(3, 3), (4, 2)])
def test_tensor_parallel_gives_the_whole_ones_numbers(num_ranks, degree, run_ranks):
    """With sequence parallel before it; on four ranks also FSDP2. 301 ids do not divide."""
    cases = ["tensor_parallel", *(["mixed_precision"] if num_ranks == 4 else [])]
    results = run_ranks("logprob_head_ranks", num_ranks, cases=cases, tp=degree)
    for result in results:
        assert result["tensor_parallel"]["names"] == ["norm.weight", "output.weight"]
        if num_ranks == 4:
            assert result["mixed_precision"]["dtypes"] == ["torch.float32", "torch.float32"]
        for case, bound in zip(cases, (1e-5, 2e-2), strict=False):
            assert max(result[case]["errors"].values()) < bound, result[case]["errors"]


def test_the_layout_and_the_setting_decide_what_is_kept():
    config = JobConfig()
    layout = config.parallelism
    kept = {(1, "GPipe"): True, (2, "GPipe"): False, (2, "1F1B"): True}
    for (degree, schedule), is_kept in kept.items():
        layout.pipeline_parallel_degree, layout.pipeline_parallel_schedule = degree, schedule
        for is_wanted in (True, False):
            config.grpo.logprob_keep_logits = is_wanted
            found = scoring_settings(config).keep_logits
            assert found is (is_kept and is_wanted), (degree, schedule)
