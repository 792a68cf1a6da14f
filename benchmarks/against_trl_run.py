# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Trains with TRL's GRPOTrainer, in TRL's environment, for `against_trl.py`."""

import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from arithmetic_reward import right_digits
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class StepLog(TrainerCallback):
    """Writes a line with the duration and the metrics of each step, in the first process."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin, self._seconds = path, 0.0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self._seconds, self._begin = now - self._begin, now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        # The last record is about the whole run.
        if state.is_world_process_zero and "reward" in logs:
            with self._path.open("a") as file:
                file.write(json.dumps({"seconds": self._seconds} | logs) + "\n")


def replay(trainer: Any, path: Path) -> None:
    """Makes the trainer take its completions from a file, in which each line is a step with all its groups.

    A group is ``[prompt_ids, [completion_ids, ...]]``. Unknown tokens of a prompt raise IndexError.
    """
    steps = map(json.loads, path.read_text().splitlines())

    def recorded(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        left: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for prompt, completions in next(steps):
            left[tuple(prompt)] += completions
        return [left[tuple(prompt)].pop(0) for prompt in prompt_ids], None

    trainer._generate_single_turn = recorded


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    num_sequences = job["prompts"] * job["group_size"] // job["processes"]
    microbatch = math.gcd(16, num_sequences)  # larger ones are no faster on a CPU
    settings: dict[str, Any] = {
        "output_dir": str(folder), "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "max_steps": job["steps"], "seed": job["seed"], "shuffle_dataset": False,
        "per_device_train_batch_size": microbatch, "num_generations": job["group_size"],
        "gradient_accumulation_steps": num_sequences // microbatch,
        "max_completion_length": job["max_new_tokens"], "temperature": job["temperature"], "top_p": 1.0, "top_k": 0,
        # The clipped loss, as the mean over all tokens of the batch
        "loss_type": "dapo", "epsilon": 0.2, "beta": 0.0, "num_iterations": 1, "scale_rewards": "group",
        "mask_truncated_completions": False,
        "learning_rate": job["lr"], "lr_scheduler_type": "constant", "adam_beta1": 0.9, "adam_beta2": job["beta2"],
        "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
        # Weights in float32, with autocast for bfloat16
        "use_cpu": True, "model_init_kwargs": {"dtype": "float32"}, "bf16": job["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=right_digits,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[StepLog(folder / "metrics.jsonl")],
    )
    if "replay" in job:
        replay(trainer, Path(job["replay"]))
    trainer.train()


if __name__ == "__main__":
    main()
