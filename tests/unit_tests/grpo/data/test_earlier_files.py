# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Records that an earlier commit wrote are read, and give the same rows.

The files in ``earlier`` hold rollouts of several versions and turns, with masks, ratings and missing
rewards; ``rows.npz`` holds the rows that an earlier commit made of them. A record's fields are those of
the types: one that is renamed or added without a default makes this fail, and needs a new format.
"""

from pathlib import Path

import numpy as np
import pytest

from torchtitan.grpo.config import GRPO
from torchtitan.grpo.data.cost import token_cost
from torchtitan.grpo.data.record import RecordReader, RolloutRecorder
from torchtitan.grpo.data.rows import TrainRows
from torchtitan.grpo.data.step_plan import plan_step
from torchtitan.grpo.losses.distillation import sampled_reverse_kl
from torchtitan.grpo.rollout.saved import SavedRolloutsError, read_saved
from torchtitan.grpo.types import RolloutGroup

FILES = Path(__file__).parent / "earlier"
RECORD = FILES / "rollouts.gz"


def read(path: Path) -> list:
    return [batch for _, batch in RecordReader(str(path), 64, 1.0, "rollout.replay")]


def rows_of(groups: list[RolloutGroup]) -> list[TrainRows]:
    plan = plan_step(
        groups, GRPO(), num_ranks=2, row_len=20, local_batch_size=1,
        max_new_tokens=10, balance=True, cost=token_cost, row_bucket=1,
    )  # fmt: skip
    return plan.rows_of_rank


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_record_gives_the_rows_of_the_release_that_wrote_it(is_written_again, tmp_path):
    batches, path = read(RECORD), RECORD
    if is_written_again:
        path = tmp_path / "rollouts.jsonl.gz"
        recorder = RolloutRecorder(str(path), 64, 1.0, 0)
        for batch in batches:
            recorder.write(batch.version, batch.progress, batch.groups)
        recorder.close()
    expected = np.load(FILES / "rows.npz")
    for step, batch in enumerate(read(path)):
        for rank, rows in enumerate(rows_of(batch.groups)):
            found = rows.tensors()
            del found["reach"], found["host_reach"]  # which that release did not have
            found["host_sequence_ids"] = found["sequence_ids"]
            ratings = found.pop("teacher_logprobs")
            found["teacher_kl"] = sampled_reverse_kl(
                rows.generator_logprobs, ratings, rows.loss_mask
            )
            prefix = f"{step}/{rank}/"
            assert {n.removeprefix(prefix) for n in expected if n.startswith(prefix)} == set(found)
            for name, tensor in found.items():
                of_earlier = expected[prefix + name]
                assert tensor.numpy().dtype == of_earlier.dtype, name
                np.testing.assert_array_equal(tensor.numpy(), of_earlier, err_msg=name)


def test_saved_rollouts_of_an_earlier_form_are_refused_whole():
    """A resumed run says so, and samples their prompts again."""
    with pytest.raises(SavedRolloutsError, match="cannot be read"):
        read_saved(FILES / "step-2.msgpack", 2)
