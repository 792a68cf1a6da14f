"""Runs the Triton kernels of the softmax in Triton's interpreter, in place of the passes on a CPU.

Measures what differs from float64 and from the passes, and the bytes that the kernels load and store.
"""

import itertools
import json
import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist
from linear_logprob_ranks import compare as compare_ranks
from triton.runtime.interpreter import InterpreterBuilder

from torchtitan.grpo.losses import softmax_kernels, softmax_passes
from torchtitan.grpo.losses.linear_logprobs import packed_linear_logprobs

# Wider than a block of the kernels, and no multiple of it.
TOKENS, VOCAB, DIM = (2, 2), 2600, 16


class Traffic:
    def __init__(self) -> None:
        self.loaded = self.stored = 0
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder, ptrs, mask, *rest):
            self.loaded += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder, ptrs, value, mask, *rest):
            self.stored += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return store(builder, ptrs, value, mask, *rest)

        InterpreterBuilder.create_masked_load = counted_load
        InterpreterBuilder.create_masked_store = counted_store

    def take(self) -> tuple[int, int]:
        found = self.loaded, self.stored
        self.loaded = self.stored = 0
        return found


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def make_inputs(dtype: torch.dtype, num_others: int, scale: float):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*TOKENS, DIM, generator=generator) * scale
    weight = torch.randn(VOCAB, DIM, generator=generator)
    labels = torch.randint(0, VOCAB, TOKENS, generator=generator)
    others = torch.rand(*TOKENS, VOCAB, generator=generator).topk(max(num_others, 1)).indices
    # The label may be one of the others; ids outside of the vocabulary may be repeated.
    others[0, 0, 0] = labels[0, 0]
    others[0, 1, -2:] = VOCAB
    labels[1, 0] = VOCAB + 7
    grads = torch.randn(*TOKENS, 2 + num_others, generator=generator)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, labels, others if num_others else None, grads


def reference(hidden, weight, labels, others, temperature, trains_entropy):
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    ids = labels[..., None] if others is None else torch.cat((labels[..., None], others), -1)
    inside = ids < VOCAB
    picked = log_p.gather(-1, torch.where(inside, ids, 0))
    picked = torch.where(inside, picked, -torch.inf)
    return torch.cat((picked[..., :1], entropy if trains_entropy else entropy.detach(),
                      picked[..., 1:]), -1)  # fmt: skip


def compare(dtype, temperature, num_others, entropy, keep_logits, scale) -> dict[str, float]:
    hidden, weight, labels, others, grads = make_inputs(dtype, num_others, scale)
    with_entropy, trains_entropy = entropy
    found = packed_linear_logprobs(
        hidden, weight, labels, temperature=temperature, chunk_tokens=2, with_entropy=with_entropy,
        trains_entropy=trains_entropy, keep_logits=keep_logits, other_ids=others,
    )  # fmt: skip
    expected = reference(hidden, weight, labels, others, temperature, trains_entropy)
    if not with_entropy:
        expected = expected.clone()
        expected[..., 1] = 0.0
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    ours = torch.autograd.grad(found, (hidden, weight), grads.to(found.dtype))
    # An id outside of the vocabulary passes a gradient to the normalizer, as its log-probability
    # is -inf minus that.
    expected = torch.where(finite, expected, -log_normalizer(hidden, weight, temperature))
    theirs = torch.autograd.grad(expected, (hidden, weight), grads.double())
    return {
        "values": relative(found[finite], expected[finite]),
        "hidden": relative(ours[0], theirs[0]),
        "weight": relative(ours[1], theirs[1]),
    }


def log_normalizer(hidden, weight, temperature):
    return (hidden.double() @ weight.double().T / temperature).logsumexp(-1, keepdim=True)


def largest_errors() -> dict[str, dict[str, float]]:
    largest: dict[str, dict[str, float]] = {}
    entropies = ((False, False), (True, False), (True, True))
    # Half of all combinations, in which each two settings occur with each other.
    cases = [
        (temperature, num_others, entropy, (temperature == 1.0) == (num_others == 0))
        for temperature, num_others, entropy in itertools.product((1.0, 0.7), (0, 3), entropies)
    ]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        worst = largest.setdefault(str(dtype).removeprefix("torch."), {})
        # Another dtype is another load and store, which the last case shows.
        for number, case in enumerate(cases if dtype == torch.float32 else cases[-1:]):
            for name, error in compare(dtype, *case, scale=(1.0, 12.0)[number % 2]).items():
                worst[name] = max(worst.get(name, 0.0), error)
    return largest


def half_precision_errors() -> dict[str, float]:
    """Of gradients that are written in bfloat16, as on a GPU; and whether both ways agree."""
    torch.manual_seed(0)
    tokens, width, start = 3, 2600, 640
    logits, ids = torch.randn(tokens, width) * 3, torch.randint(0, 2 * width, (tokens, 130))
    ids[:, 0] = ids[:, 5]
    rows = [torch.randn(tokens) for _ in range(3)]
    of_ids = torch.randn(tokens, ids.shape[1])
    outs = [torch.empty(tokens, width, dtype=torch.bfloat16) for _ in range(2)]
    exact = torch.empty(tokens, width, dtype=torch.float64)
    ours, theirs = softmax_kernels.write_grads, softmax_passes._write_grads
    ours(logits, start, ids, 0.8, *rows, of_ids, outs[0])
    theirs(logits, start, ids, 0.8, *rows, of_ids, outs[1])
    doubles = [x.double() for x in rows]
    theirs(logits.double(), start, ids, 0.8, *doubles, of_ids.double(), exact)
    return {"kernel": relative(outs[0], exact), "passes": relative(outs[1], exact)}


def bytes_per_logit(traffic: Traffic) -> dict[str, list[float]]:
    """Loaded and stored bytes for each logit, at a width at which those of a row hardly count."""
    torch.manual_seed(0)
    tokens, width = 2, 12_800
    logits, ids = torch.randn(tokens, width), torch.zeros(tokens, 1, dtype=torch.int64)
    rows = [torch.zeros(tokens) for _ in range(3)]
    found = {}
    for entropy in (False, True):
        traffic.take()
        softmax_kernels.sum_slice(
            logits, 0, ids, 1.0, entropy, *rows, torch.zeros(tokens, 1), torch.empty(0)
        )
        found["forward with entropy" if entropy else "forward"] = traffic.take()
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(tokens, width, dtype=dtype)
        softmax_kernels.write_grads(logits, 0, ids, 1.0, *rows, torch.zeros(tokens, 1), out)
        found[f"backward to {dtype}"] = traffic.take()
    return {name: [n / logits.numel() for n in counts] for name, counts in found.items()}


def sharded_rank(rank: int, num_ranks: int, store: str, results: Any) -> None:
    method = f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=num_ranks)
    results.put([compare_ranks(vocab, 0.7, TOKENS) for vocab in (301, 4)])
    dist.destroy_process_group()


def main() -> None:
    """Prints, as JSON, what each rank found with a vocabulary sharded over all, and what one found."""
    num_ranks, store = int(sys.argv[1]), sys.argv[2]
    traffic = Traffic()
    softmax_passes.sum_slice.register_kernel("cpu")(softmax_kernels.sum_slice)
    softmax_passes.write_grads.register_kernel("cpu")(softmax_kernels.write_grads)
    # Before the first kernel, so that no thread is lost in a fork.
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=sharded_rank, args=(rank, num_ranks, store, results))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    found = {
        "bytes": bytes_per_logit(traffic),
        "half": half_precision_errors(),
        "errors": largest_errors(),
        "used": traffic.take(),
    }
    found["sharded"] = [results.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join(60)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
