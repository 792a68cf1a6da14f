"""Costs of sequences follow the model that is trained."""

import json

import pytest

from torchtitan.grpo.data.cost import flops_cost, token_cost

DENSE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 10,
    "vocab_size": 50,
}
MOE = DENSE | {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 5,
    "intermediate_size": 999,
}


def test_tokens_cost_their_number():
    assert token_cost(7) == 7


def test_a_dense_model_costs_its_products_by_hand():
    cost = flops_cost(DENSE)
    # A layer: queries and output 8 x 12, keys and values 8 x 6, the gated feed-forward 3 x 8 x 10.
    weights = 2 * (2 * 96 + 2 * 48 + 240) + 8 * 50
    assert cost.per_token == 3 * 2 * weights
    # Two layers; scores and values, twelve multiplications and additions each.
    assert cost.per_pair == 3 * 2 * 2 * (2 * 12)
    assert cost(3) == 3 * cost.per_token + 6 * cost.per_pair


def test_tokens_meet_the_experts_that_they_are_sent_to():
    weights = 2 * (2 * 96 + 2 * 48 + 8 * 16 + 2 * 3 * 8 * 5) + 8 * 50
    assert flops_cost(MOE).per_token == 3 * 2 * weights
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert flops_cost(renamed | {"num_local_experts": 16}) == flops_cost(MOE)
    assert flops_cost(MOE).per_pair == flops_cost(DENSE).per_pair


def test_what_a_config_leaves_out_is_what_the_model_takes():
    short = {k: v for k, v in DENSE.items() if k not in ("head_dim", "num_key_value_heads")}
    assert flops_cost(short) == flops_cost(short | {"head_dim": 2, "num_key_value_heads": 4})
    assert flops_cost(DENSE | {"head_dim": None}) == flops_cost(DENSE | {"head_dim": 2})


def test_a_shipped_model_s_config_has_a_cost(repository):
    path = repository / "assets/reverse_digits/model/config.json"
    cost = flops_cost(json.loads(path.read_text()))
    assert cost(0) == 0
    # A long sequence costs more than two of half its length.
    assert cost(64) > 2 * cost(32) > 0


@pytest.mark.parametrize("num_tokens", [1, 2, 100])
def test_operations_grow_with_the_pairs_of_tokens(num_tokens):
    cost = flops_cost(DENSE)
    pairs = sum(range(1, num_tokens + 1))
    assert cost(num_tokens) == cost.per_token * num_tokens + cost.per_pair * pairs
