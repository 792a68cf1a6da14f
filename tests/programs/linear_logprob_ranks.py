"""Compares log-probabilities with a sharded vocabulary with those of the whole vocabulary."""

import torch
import torch.distributed as dist

from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


def main(arguments):
    dist.init_process_group("gloo")
    return {"cases": [compare(vocab, arguments["temperature"]) for vocab in arguments["vocabs"]]}


def compare(vocab: int, temperature: float, tokens: tuple[int, int] = (2, 9)) -> dict:
    torch.manual_seed(0)
    hidden = torch.randn(*tokens, 8)
    weight = torch.randn(vocab, 8)
    labels = torch.randint(0, vocab, tokens)
    others = torch.rand(*tokens, vocab).topk(min(vocab, 40)).indices
    grads = torch.randn(*tokens, 2 + others.shape[-1])
    settings = {
        "temperature": temperature, "chunk_tokens": 3, "with_entropy": True, "other_ids": others,
    }  # fmt: skip

    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = packed_linear_logprobs(*whole, labels, **settings)
    expected.backward(grads)

    width = -(-vocab // dist.get_world_size())
    start = min(dist.get_rank() * width, vocab)
    piece = slice(start, min(start + width, vocab))
    mine = [hidden.clone().requires_grad_(), weight[piece].clone().requires_grad_()]
    packed = packed_linear_logprobs(
        *mine, labels, **settings, group=dist.group.WORLD, vocab_start=start
    )
    packed.backward(grads)
    again = [x.detach().clone().requires_grad_() for x in mine]
    packed_linear_logprobs(
        *again, labels, **settings, keep_logits=False, group=dist.group.WORLD, vocab_start=start
    ).backward(grads)
    partial_sum = mine[0].grad.clone()
    dist.all_reduce(partial_sum)
    of_all = [torch.empty_like(packed) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, packed.detach())
    return {
        "same_without_keeping": all(
            torch.equal(x.grad, y.grad) for x, y in zip(mine, again, strict=True)
        ),
        "same_on_all_ranks": all(torch.equal(x, packed) for x in of_all),
        "errors": {
            "logprobs": relative(packed[..., 0], expected[..., 0]),
            "entropy": relative(packed[..., 1], expected[..., 1]),
            "others": relative(packed[..., 2:], expected[..., 2:]),
            "hidden": relative(partial_sum, whole[0].grad),
            "weight": relative(mine[1].grad, whole[1].grad[piece]),
        },
    }
