"""Metrics of the loss, combined over microbatches, parts and ranks by their reductions."""

import math

import pytest
import torch

from torchtitan.grpo.losses.loss_metrics import (
    Metric,
    MetricTotals,
    TokenMetric,
    loss_metric,
    mean_metric,
    token_metric,
)

VALUES = torch.tensor([[3.0, -7.0, 5.0], [2.0, 9.0, -1.0]])
MASK = torch.tensor([[True, False, True], [True, False, False]])


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", 10.0), ("mean", 10 / 3), ("max", 5.0), ("min", 2.0)]
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_only_trained_tokens_count_however_they_are_split(reduction, expected, num_microbatches):
    rows = zip(VALUES.chunk(num_microbatches), MASK.chunk(num_microbatches), strict=True)
    microbatches = [{"m": token_metric(TokenMetric(v, reduction), mask)} for v, mask in rows]
    totals, merged = MetricTotals({"m": reduction}), MetricTotals({"m": reduction})
    totals.add(microbatches)
    for microbatch in microbatches:
        of_minibatch = MetricTotals({"m": reduction})
        of_minibatch.add([microbatch])
        merged.merge(of_minibatch)
    assert totals.values(1)["m"] == merged.values(1)["m"] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min"])
def test_untrained_values_may_be_anything_and_nothing_trained_is_zero(reduction):
    anything = torch.tensor([[math.nan, math.inf, -math.inf]])
    metric = token_metric(TokenMetric(anything, reduction), torch.zeros(1, 3, dtype=torch.bool))
    totals, alone = MetricTotals({"m": reduction}), MetricTotals({"m": reduction})
    assert totals.values(1)["m"] == 0, "no microbatch at all"
    totals.add([{"m": metric}])
    assert totals.values(1)["m"] == 0
    # A microbatch without a trained token leaves the others as they are.
    for each in (totals, alone):
        each.add([{"m": token_metric(TokenMetric(VALUES, reduction), MASK)}])
    assert totals.values(1) == alone.values(1)


def test_only_terms_of_the_loss_are_scaled_and_averaged_over_optimizer_steps():
    reductions = {"t": "loss", "mean": "mean", "sum": "sum", "size": "effective_size", "max": "max"}
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    metrics = {
        "t": loss_metric(torch.tensor(6.0, requires_grad=True)),
        "mean": mean_metric(one, two),
        "sum": Metric("sum", (two,)),
        "size": Metric("effective_size", (two, two, two)),
        "max": Metric("max", (two,)),
    }
    totals = MetricTotals(reductions)
    totals.add([metrics], scale=0.5)
    totals.add([metrics], scale=1.0)
    totals.scale_losses(4.0)
    assert totals.values(3) == {"t": 12.0, "mean": 0.5, "sum": 4.0, "size": 1.0, "max": 2.0}


def test_metrics_that_change_between_calls_are_refused_by_name():
    totals = MetricTotals({"a": "sum", "b": "sum"})
    metric = Metric("sum", (torch.tensor(1.0),))
    with pytest.raises(ValueError, match=r"same metrics .* in each call, .*first call: b, c\.$"):
        totals.add([{"a": metric, "c": metric}])
    with pytest.raises(ValueError, match=r"first call: a\.$"):
        totals.add([{"a": mean_metric(torch.tensor(1.0), torch.tensor(1.0)), "b": metric}])
