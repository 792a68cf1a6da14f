"""What a Hugging Face model computes for a few sequences."""

from typing import Any

import torch

SEQUENCES = [
    [5, 6, 7, 8, 9], [5, 6, 7, 1], [1, 2, 3],
    [4, 3, 2, 1, 0, 11, 12], [4, 3, 2, 1, 7], [4, 3, 9, 8, 7, 6],
]  # fmt: skip
PROMPTS = [3, 3, 2, 4, 4, 3]
"""Number of tokens of each sequence that are its prompt."""
ROWS = [[0, 1, 2], [3, 4, 5], [], []]
GROUPS = [0, 0, -1, 1, 1, 1]
"""The first two sequences share a context, and the last three one of which two share more."""
SEQ_LEN = 20
ARGUMENTS = {
    "sequences": SEQUENCES, "prompts": PROMPTS, "rows": ROWS, "sharing": GROUPS, "seq_len": SEQ_LEN,
}  # fmt: skip
"""For programs that make rows of them."""


def reference(
    model: Any, sequences: list[list[int]] = SEQUENCES, prompts: list[int] = PROMPTS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the logprobs of all tokens behind prompts, and the gradients of their sum."""
    logprobs = []
    for ids, num_prompt in zip(sequences, prompts, strict=True):
        logits = model(torch.tensor([ids])).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        logprobs.append(picked[num_prompt - 1 :])
    torch.cat(logprobs).sum().backward()
    return torch.cat(logprobs).detach(), gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients of all parameters that have one, by names of a directory's tensors."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.grad is None:
            continue
        stem, _, kind = name.rpartition(".experts.")
        if not stem:
            gradients[name] = parameter.grad
            continue
        # transformers keeps the experts of a layer in one tensor, and files each on its own.
        parts = {"down_proj": parameter.grad}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), parameter.grad.chunk(2, 1), strict=True))
        for part, gradient in parts.items():
            for i, of_expert in enumerate(gradient):
                gradients[f"{stem}.experts.{i}.{part}.weight"] = of_expert.contiguous()
    return gradients
