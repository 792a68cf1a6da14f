"""The trainer takes the steps that plain torch takes, alone and in each kind of layout.

The expected weights come from a loop of transformers, AdamW and ``clip_grad_norm_`` below,
which shares no code with the package. Gradients are clipped in every step, the learning rate
changes in every step, and a large epsilon makes AdamW depend on the size of gradients, so that
a step that was left out or scaled shows in the weights.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_settings
import torch
from replay_settings import (
    JOBS,
    PIPELINE,
    VOCAB_SIZE,
    assert_jobs_were_run,
    assert_same_weights,
    events_of_steps,
    layout_case,
)
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup, TopTokens

SEQ_LEN = 24
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 4, 2, 3
LR, WEIGHT_DECAY, EPS, MAX_NORM = 2e-2, 0.1, 1e-2, 0.2
# Two steps of warm-up, one at the full rate, then the decay towards 0 after the last step.
LR_FACTORS = (0.5, 1.0, 1.0, 0.5)
KL_COEF, EMA = 0.3, 0.75
TOP_K = 3


@dataclass(frozen=True)
class Algorithm:
    """What the plain loop does besides GRPO's policy loss."""

    num_epochs: int = 1
    kl_in: str | None = None
    ema: float = 0.0
    tied: bool = True
    teacher_coef: float = 0.0
    teacher_top_k: int = 0


PLAIN = Algorithm()
TWO_UPDATES = Algorithm(num_epochs=2)
MOVING_REFERENCE = Algorithm(kl_in="loss", ema=EMA)
KL_IN_REWARD = Algorithm(kl_in="reward")
UNTIED = Algorithm(tied=False)
TAUGHT = Algorithm(teacher_coef=0.5)
TAUGHT_TOP_K = Algorithm(teacher_coef=0.5, teacher_top_k=TOP_K)
UNTIED_TOP_K = Algorithm(teacher_coef=0.5, teacher_top_k=TOP_K, tied=False)


@dataclass(frozen=True)
class Expected:
    """What the plain loop leaves behind: Hugging Face weights, and a record for each step."""

    weights: dict[str, torch.Tensor]
    steps: list[dict[str, float]]


class World:
    """Two models, each with a reference, and recorded batches for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for tied in (True, False):
            model = replay_settings.small_model(tied)
            replay_settings.save(model, self.model_of(tied))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
            replay_settings.save(model, self.reference_of(tied))
        self.batches = random_batches()
        self.record = write_record(folder / "rollouts.jsonl", self.batches)
        # The same ratings for the plain loop, which uses those that an algorithm asks for.
        self.batches = [[rate(group) for group in groups] for groups in self.batches]
        self.rated_record = write_record(folder / "rated.jsonl", self.batches)
        self._expected: dict[Algorithm, Expected] = {}

    def model_of(self, tied: bool) -> Path:
        return self.folder / ("tied" if tied else "untied")

    def reference_of(self, tied: bool) -> Path:
        return self.folder / ("tied-reference" if tied else "untied-reference")

    def expected(self, algorithm: Algorithm) -> Expected:
        if algorithm not in self._expected:
            folders = self.model_of(algorithm.tied), self.reference_of(algorithm.tied)
            models = [Qwen3ForCausalLM.from_pretrained(x, dtype=torch.float32) for x in folders]
            self._expected[algorithm] = train_plainly(*models, self.batches, algorithm)
        return self._expected[algorithm]

    def case(
        self, name: str, algorithm: Algorithm = PLAIN, dump: str = "", **more: Any
    ) -> dict[str, Any]:
        settings = {
            "job.dump_folder": self.folder / "dump" / (dump or name),
            "model.hf_assets_path": self.model_of(algorithm.tied),
            "training.steps": NUM_STEPS, "training.seq_len": SEQ_LEN, "training.max_norm": MAX_NORM,
            "optimizer.lr": LR, "optimizer.beta2": 0.95, "optimizer.eps": EPS,
            "optimizer.weight_decay": WEIGHT_DECAY,
            "lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 1.0,
            "rollout.replay": self.record, "rollout.max_new_tokens": 16,
            "grpo.prompts_per_step": NUM_GROUPS, "grpo.group_size": GROUP_SIZE,
            "grpo.mismatch_correction": "none",
        }  # fmt: skip
        return replay_settings.case(name, settings | self._settings_of(algorithm), more)

    def _settings_of(self, algorithm: Algorithm) -> dict[str, Any]:
        if algorithm.teacher_coef:
            return {
                "rollout.replay": self.rated_record,
                "teacher.coef": algorithm.teacher_coef,
                "teacher.top_k": algorithm.teacher_top_k,
            }
        if algorithm.kl_in is None:
            return {"grpo.num_epochs": algorithm.num_epochs}
        return {
            "grpo.kl_coef": KL_COEF,
            "grpo.kl_in": algorithm.kl_in,
            "grpo.ref_model_ema": algorithm.ema,
            "grpo.ref_model_path": self.reference_of(algorithm.tied),
        }

    def metrics(self, dump: str) -> list[dict[str, float]]:
        return replay_settings.records(self.folder / "dump" / dump)

    def exported(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


def random_batches() -> list[list[RolloutGroup]]:
    random = np.random.default_rng(0)

    def tokens(low: int, high: int) -> np.ndarray:
        return random.integers(3, VOCAB_SIZE, random.integers(low, high)).astype(np.int32)

    def group(index: int, version: int) -> RolloutGroup:
        prompt, rollouts = tokens(2, 5), []
        for member in range(GROUP_SIZE):
            completion = tokens(3, 9)
            logprobs = -random.uniform(2, 6, len(completion))
            reward = float(member) + float(random.uniform())
            rollouts.append(replay_settings.rollout(prompt, completion, logprobs, version, reward))
        return RolloutGroup(index, "", tuple(rollouts), "")

    return [
        [group(NUM_GROUPS * step + i, step) for i in range(NUM_GROUPS)] for step in range(NUM_STEPS)
    ]


def teacher_part(length: int, lengths: list[int]) -> torch.Tensor:
    """What the teacher likes more than the student by a nat gains one, above the group's mean."""
    signs = [2.0 * (torch.arange(n) % 2) - 1 for n in (length, *lengths)]
    return signs[0] - torch.cat(signs[1:]).mean()


def write_record(path: Path, batches: list[list[RolloutGroup]]) -> Path:
    recorder = RolloutRecorder(str(path), VOCAB_SIZE, 1.0, 0)
    for step, groups in enumerate(batches):
        recorder.write(step, PromptProgress(10 * (step + 1), (step, step + 5)), groups)
    recorder.close()
    return path


def rate(group: RolloutGroup) -> RolloutGroup:
    """A teacher's rating, which likes every other token more than the student does."""
    signs = (np.where(np.arange(len(r.token_ids)) % 2, 1, -1) for r in group.rollouts)
    rollouts = []
    for r, sign in zip(group.rollouts, signs, strict=True):
        top = random_top_tokens(len(r.token_ids), seed=int(r.token_ids.sum()))
        ratings = {"teacher_top_ids": top.ids, "teacher_top_logprobs": top.logprobs}
        ratings["teacher_logprobs"] = (r.logprobs + sign).astype(np.float32)
        rollouts.append(replace(r, **ratings))
    return replace(group, rollouts=tuple(rollouts))


def random_top_tokens(num_tokens: int, seed: int) -> TopTokens:
    logits = torch.randn(num_tokens, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logprobs, ids = logits.log_softmax(-1).topk(TOP_K)
    return TopTokens(ids.int().numpy(), logprobs.numpy())


def coarse_reverse_kl(student: torch.Tensor, top: TopTokens) -> torch.Tensor:
    """The sum over tokens of the divergence over the teacher's tokens and all others as one."""
    of_teacher = torch.from_numpy(top.logprobs).exp()
    of_student = student.gather(1, torch.from_numpy(top.ids).long()).exp()
    p, q = (
        torch.cat([each, 1 - each.sum(1, keepdim=True)], dim=1) for each in (of_student, of_teacher)
    )
    return (p * (p / q).log()).sum()


def token_ids(rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt's and the completion's token ids."""
    prompt, completion = rollout.prompt_ids, rollout.token_ids
    return torch.from_numpy(prompt).long(), torch.from_numpy(completion).long()


def completion_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    prompt, completion = token_ids(rollout)
    return all_logprobs(model, prompt, completion).gather(1, completion[:, None])[:, 0]


def all_logprobs(model: Any, prompt: torch.Tensor, completion: torch.Tensor) -> torch.Tensor:
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    difference = ref_logprobs - logprobs
    return difference.exp() - 1 - difference


def advantages_of(groups: list[RolloutGroup], kl_sums: list[float]) -> torch.Tensor:
    rewards = torch.tensor([r.reward for g in groups for r in g.rollouts], dtype=torch.float64)
    by_group = (rewards - KL_COEF * torch.tensor(kl_sums)).view(len(groups), -1)
    centered = by_group - by_group.mean(1, keepdim=True)
    return (centered / (by_group.std(1, keepdim=True) + 1e-4)).flatten().float()


def train_plainly(
    model: Any, reference: Any, batches: list[list[RolloutGroup]], algorithm: Algorithm
) -> Expected:
    """GRPO in one process, one sequence at a time."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY
    )
    steps = []
    for groups, factor in zip(batches, LR_FACTORS, strict=True):
        for settings in optimizer.param_groups:
            settings["lr"] = LR * factor
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with torch.no_grad():
            old = [completion_logprobs(model, rollout) for rollout in rollouts]
            ref = [completion_logprobs(reference, rollout) for rollout in rollouts]
        kl_sums = [0.0] * len(rollouts)
        if algorithm.kl_in == "reward":
            sampled = [torch.from_numpy(rollout.logprobs) for rollout in rollouts]
            kl_sums = [float(k3(*pair).sum()) for pair in zip(sampled, ref, strict=True)]
        advantages = advantages_of(groups, kl_sums)
        lengths = [[len(r.token_ids) for r in g.rollouts] for g in groups]
        taught = [teacher_part(n, of_group) for of_group in lengths for n in of_group]
        record = {"trained_tokens": float(sum(len(x) for x in old)), "loss": 0.0, "grad_norm": 0.0}
        for _ in range(algorithm.num_epochs):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for rollout, advantage, old_lp, ref_lp, likes in zip(
                rollouts, advantages, old, ref, taught, strict=True
            ):
                whole = all_logprobs(model, *token_ids(rollout))
                logprobs = whole.gather(1, token_ids(rollout)[1][:, None])[:, 0]
                if algorithm.teacher_top_k:
                    ids, values = rollout.teacher_top_ids, rollout.teacher_top_logprobs
                    assert ids is not None and values is not None
                    kl = coarse_reverse_kl(whole, TopTokens(ids, values))
                    loss = loss + algorithm.teacher_coef * kl
                elif algorithm.teacher_coef:
                    advantage = advantage + algorithm.teacher_coef * likes
                ratio = (logprobs - old_lp).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum()
                if algorithm.kl_in == "loss":
                    loss = loss + KL_COEF * k3(logprobs, ref_lp).sum()
            loss = loss / record["trained_tokens"]
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            assert norm > 2 * MAX_NORM, "a gradient that is not clipped shows nothing"
            optimizer.step()
            record["loss"] += loss.item() / algorithm.num_epochs
            record["grad_norm"] += norm.item() / algorithm.num_epochs
        with torch.no_grad():
            for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
                if algorithm.ema:
                    mine.lerp_(theirs, 1 - algorithm.ema)
        steps.append(record | {"lr": LR * factor})
    return Expected(replay_settings.hf_weights(model, algorithm.tied), steps)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("replayed"))


def assert_same_steps(found, expected: list[dict[str, float]], label: str) -> None:
    assert len(found) == len(expected), label
    for step, (mine, plain) in enumerate(zip(found, expected, strict=True), start=1):
        where = f"{label}, step {step}"
        assert mine["loss/total"] == pytest.approx(plain["loss"], rel=1e-3, abs=2e-5), where
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3), where
        assert mine["data/trained_tokens"] == plain["trained_tokens"], where
        assert mine["lr"] == pytest.approx(plain["lr"]), where


def test_one_process_takes_the_steps_of_plain_torch(world, run_ranks):
    algorithms = {
        "plain": PLAIN, "two updates": TWO_UPDATES, "kl in the reward": KL_IN_REWARD,
        "taught": TAUGHT, "taught top k": TAUGHT_TOP_K,
    }  # fmt: skip
    checkpointed = {
        "dump": "moving", "checkpoint__enable": True, "checkpoint__interval": 2,
        "checkpoint__last_save_model_only": True,
    }  # fmt: skip
    interrupted = {
        "dump": "short", "checkpoint__enable": True, "checkpoint__interval": 3,
        "training__steps": 6, "lr_scheduler__total_steps": NUM_STEPS,
        "grpo__hf_export_interval": 3,
    }  # fmt: skip
    cases = [
        *(world.case(name, algorithm) for name, algorithm in algorithms.items()),
        world.case(
            "parts", PLAIN, rollout__stream=True, rollout__stream_parts=2,
            checkpoint__export_dtype="bfloat16",
        ),
        world.case("moving reference", MOVING_REFERENCE, **checkpointed),
        world.case("refused", MOVING_REFERENCE, **checkpointed),
        world.case("resumed", MOVING_REFERENCE, **checkpointed, checkpoint__load_step=2),
        # More steps than the record has batches: the run ends early, with a whole checkpoint.
        world.case("short", PLAIN, **interrupted),
        world.case("short again", PLAIN, **interrupted),
        world.case(
            "another rate", PLAIN, **interrupted, checkpoint__load_step=3, optimizer__lr=0.0
        ),
    ]  # fmt: skip
    (results,) = run_ranks("replayed_runs", 1, folder=str(world.folder), cases=cases)

    for name, algorithm in (algorithms | {"moving reference": MOVING_REFERENCE}).items():
        expected = world.expected(algorithm)
        assert_same_weights(world.exported(name), expected.weights, name)
        dump = "moving" if algorithm.ema else name
        assert_same_steps(world.metrics(dump), expected.steps, name)

    whole = events_of_steps(range(1, 5))
    assert results["plain"]["events"] == results["parts"]["events"] == whole
    assert results["two updates"]["events"] == events_of_steps(range(1, 5), updates=2)
    assert_is_bfloat16_of(world, "parts", "plain")
    assert_same_steps(world.metrics("parts"), world.expected(PLAIN).steps, "parts")

    assert results["moving reference"]["events"] == events_of_steps(range(1, 5), saved=(2, 4))
    assert results["moving reference"]["progress_at_start"] == [0, []]
    assert "must resume from a whole checkpoint" in results["refused"]["error"]
    assert results["resumed"]["progress_at_start"] == [20, [1, 6]]
    assert results["resumed"]["progress"] == [40, [3, 8]]
    assert results["resumed"]["events"] == events_of_steps(range(3, 5), saved=(4,))
    uninterrupted, resumed = (world.exported(x) for x in ("moving reference", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())

    assert results["short"]["events"] == events_of_steps(range(1, 5), saved=(3,))
    assert results["short again"]["progress_at_start"] == [40, [3, 8]]
    assert results["short again"]["events"] == ["publish 4 from slot 0"]
    assert results["another rate"]["events"] == events_of_steps(range(4, 5))
    rates = [record["lr"] for record in world.metrics("short")]
    assert rates == pytest.approx([LR * 0.5, LR, LR, 0.0])
    (exported,) = (world.folder / "dump/short/hf/step-3").glob("*.safetensors")
    before, after = load_file(exported), world.exported("another rate")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ("short", "short again"):
        assert_same_weights(world.exported(name), world.expected(PLAIN).weights, name)


def assert_is_bfloat16_of(world: World, name: str, other: str) -> None:
    found, exact = world.exported(name), world.exported(other)
    assert found.keys() == exact.keys()
    for key, tensor in exact.items():
        assert found[key].dtype == torch.bfloat16, key
        torch.testing.assert_close(found[key].float(), tensor, atol=1e-3, rtol=1e-2)
    assert json.loads((world.folder / f"{name}.json").read_text())["dtype"] == "bfloat16"


def test_two_ranks_take_the_steps_of_plain_torch_in_every_kind_of_layout(world, run_ranks):
    """Ranks that hold the same rows are counted once, in metrics and in the KL of rewards."""
    fsdp, tensor = {"data_parallel_shard_degree": 2}, {"tensor_parallel_degree": 2}
    context = {"context_parallel_degree": 2}
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    layouts: dict[str, tuple[Algorithm, dict[str, Any]]] = {
        "fsdp": (KL_IN_REWARD, fsdp),
        "taught": (TAUGHT, fsdp),
        "replicas": (PLAIN, replicas),
        "tensor": (KL_IN_REWARD, tensor),
        "context": (KL_IN_REWARD, context),
        "pipeline": (UNTIED, PIPELINE),
        "top k, fsdp": (TAUGHT_TOP_K, fsdp),
        "top k, tensor": (TAUGHT_TOP_K, tensor),
        "top k, context": (TAUGHT_TOP_K, context),
        "top k, pipeline": (UNTIED_TOP_K, PIPELINE),
    }
    cases = [
        layout_case(world, name, degrees, algorithm=algorithm)
        for name, (algorithm, degrees) in layouts.items()
    ]
    results = run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    for name, (algorithm, _) in layouts.items():
        expected = world.expected(algorithm)
        assert_same_weights(world.exported(name), expected.weights, name)
        assert_same_steps(world.metrics(name), expected.steps, name)
        for rank, result in enumerate(results):
            assert result[name]["events"] == events_of_steps(range(1, 5)), (name, rank)
            assert result[name]["progress"] == [40, [3, 8]], (name, rank)


def test_a_pipeline_that_fills_its_gaps_takes_the_same_steps(world, run_ranks):
    """While it trains on a minibatch, it rates the next one under both other policies, or works on
    jobs of the user's, one of which fails.
    """
    settings: dict[str, Any] = {
        "algorithm": UNTIED,
        "grpo__num_minibatches": 2,
        "grpo__num_epochs": 2,
        "grpo__kl_coef": KL_COEF,
        "grpo__kl_in": "loss",
        "grpo__ref_model_path": world.reference_of(tied=False),
    }
    (file := world.folder / "jobs.py").write_text(JOBS)
    jobs = ",".join(f"{file}:{name}" for name in ("has_no_work", "fails", "writes"))
    more = {
        "filled": {},
        "apart": {"grpo__pipeline_fill_gaps": False},
        "jobs": {"parallelism__pipeline_fill_jobs": jobs, "grpo__pipeline_offload": 0.5},
    }
    cases = [layout_case(world, name, PIPELINE, **settings, **own) for name, own in more.items()]
    for result in run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases):
        for name in ("filled", "jobs"):
            assert result[name]["num_in_gaps"] >= NUM_STEPS
            assert result[name]["events"] == result["apart"]["events"]
        assert result["apart"]["num_in_gaps"] == 0
    key = "pipeline/gap_microbatches"
    assert sum(record.get(key, 0) for record in world.metrics("filled")) >= NUM_STEPS
    assert not any(key in record for record in world.metrics("apart"))
    apart = world.exported("apart")
    for name in ("filled", "jobs"):
        weights = world.exported(name)
        assert weights.keys() == apart.keys()
        assert all(torch.equal(weights[key], apart[key]) for key in apart), name
    assert_jobs_were_run(world.folder / "dump" / "jobs", NUM_STEPS)
