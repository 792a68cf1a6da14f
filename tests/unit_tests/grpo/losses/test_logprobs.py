import torch

from torchtitan.grpo.losses.logprobs import token_logprobs


def test_token_logprobs_are_of_the_tempered_distribution():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, labels, 0.7), expected)
