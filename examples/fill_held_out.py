# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A job for the gaps of a pipeline: another model scores texts while the run trains.

Purpose:  score held-out texts once with a model that is not trained, on all ranks of a pipeline, in
          time in which they would wait for each other (docs/how-to/fill-the-gaps.md).
Hardware: 2 CPU cores and 4 GiB of memory. In the root of the repository:
              torchtitan-grpo train train_configs/quickstart_zero_bubble.toml --nproc 2 \\
                  --parallelism.pipeline_parallel_schedule 1F1B \\
                  --parallelism.pipeline_fill_jobs examples/fill_held_out.py:score
Expected: scores-0.jsonl and scores-1.jsonl in the folder of the run, with up to 100 texts each. The
          gaps of this small model last a few milliseconds: on two busy cores, zero to four texts
          were scored in a step. The weights are those of a run without the job.
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

    scored = []
    with open(context.dump_folder / f"scores-{context.rank}.jsonl", "w") as file, torch.no_grad():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt").input_ids.to(context.device)
            scored.append((text, model(tokens, labels=tokens).loss))
            # A GPU would have to be waited for if a unit read its own result.
            write(scored[:-1], file)
            del scored[:-1]
            yield  # one text is one unit
        write(scored, file)
    finished.append(context.step)


def write(scored, file):
    for text, loss in scored:
        print(json.dumps({"text": text, "loss": loss.item()}), file=file, flush=True)
