"""Nothing is written or sent of a model that the ranks do not hold as a whole."""

from types import SimpleNamespace

import pytest

from torchtitan.grpo.models.collect import check_whole

WHOLE = [
    "tok_embeddings.weight",
    "layers.0.attention.wq.weight",
    "layers.0.ffn_norm.weight",
    "layers.1.attention.wq.weight",
    "norm.weight",
    "output.weight",
]


def test_a_whole_model_is_let_through():
    check_whole(WHOLE, SimpleNamespace(n_layers=2))
    check_whole(WHOLE[:-1], SimpleNamespace(n_layers=2, enable_weight_tying=True))


@pytest.mark.parametrize("lost", [0, 3, 4, 5])
def test_a_module_that_no_rank_holds_is_named(lost):
    names = [*WHOLE[:lost], *WHOLE[lost + 1 :]]
    module = WHOLE[lost].removesuffix(".weight").removesuffix(".attention.wq")
    with pytest.raises(RuntimeError, match=rf"missing are \['{module}'\].*module_fqns"):
        check_whole(names, SimpleNamespace(n_layers=2))


def test_a_layer_too_many_is_named():
    with pytest.raises(RuntimeError, match=r"unknown \['layers\.1'\]"):
        check_whole(WHOLE, SimpleNamespace(n_layers=1))
