# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A job for the gaps of a pipeline: another model scores texts while the run trains.

Purpose:  score held-out texts once with a model that is not trained, on all ranks of a pipeline, in
          time in which they would wait for each other (docs/how-to/fill-the-gaps.md).
Hardware: 2 CPU cores and 4 GiB of memory. In the root of the repository:
              torchtitan-grpo train train_configs/quickstart_zero_bubble.toml --nproc 2 \\
                  --parallelism.pipeline_parallel_schedule 1F1B \\
                  --parallelism.pipeline_fill_jobs examples/fill_held_out.py:score
Expected: scores-0.jsonl and scores-1.jsonl in the folder of the run, with 100 texts each. The losses
          of the run are those of a run without the job.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "assets/reverse_digits/model"
TEXTS = "assets/reverse_digits/heldout.jsonl"
NUM_TEXTS = 200

finished = []


def score(context):
    """Writes the mean negative log-likelihood of this rank's texts."""
    if finished:
        return  # asked again in each later step
    with open(TEXTS) as lines:
        rows = [json.loads(line) for line in lines][:NUM_TEXTS]
    texts = [row["prompt"] + row["answer"] for row in rows][context.rank :: context.num_ranks]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL).to(context.device).eval()
    yield  # loading was the first unit, which runs before a pass and not in a gap

    losses = []
    with torch.no_grad():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt").input_ids.to(context.device)
            losses.append(model(tokens, labels=tokens).loss)
            yield  # one text is one unit

    # A GPU would have to be waited for if each unit read its own result.
    with open(context.dump_folder / f"scores-{context.rank}.jsonl", "w") as file:
        for text, loss in zip(texts, torch.stack(losses).tolist(), strict=True):
            print(json.dumps({"text": text, "loss": loss}), file=file)
    finished.append(context.step)
