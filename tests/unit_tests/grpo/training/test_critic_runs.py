"""Runs with a critic take the steps that PPO takes in plain torch, alone and in kinds of layout.

The expected weights come from a loop of transformers, AdamW and ``clip_grad_norm_`` over one episode
at a time, which shares no code with the package. Completions have two turns with context between.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_settings
import torch
from replay_settings import PIPELINE, VOCAB_SIZE, assert_same_weights, events_of_steps, layout_case
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import Qwen3ForCausalLM

from torchtitan.grpo.data.record import RolloutRecorder
from torchtitan.grpo.types import PromptProgress, Rollout, RolloutGroup

SEQ_LEN, NUM_STEPS, NUM_EPISODES = 32, 4, 5
LR, CRITIC_LR, EPS, MAX_NORM = 1e-2, 2e-2, 1e-2, 0.1
KL_COEF, GAMMA, LAMBDA, CLIP = 0.2, 0.97, 0.9, 0.05


@dataclass(frozen=True)
class Algorithm:
    level: str = "token"
    whiten: bool = True
    warmup_steps: int = 0
    num_epochs: int = 2


TOKEN, TURN = Algorithm(), Algorithm(level="turn")
WARM = Algorithm(warmup_steps=2)
IN_PARTS = Algorithm(whiten=False, num_epochs=1)


class World:
    """A model with its reference, recorded episodes, and what the plain loop makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = replay_settings.small_model(tied=True)
        replay_settings.save(model, folder / "model")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        replay_settings.save(model, folder / "reference")
        self.batches = random_batches()
        recorder = RolloutRecorder(str(folder / "rollouts.jsonl"), VOCAB_SIZE, 1.0, 0)
        for step, rollouts in enumerate(self.batches):
            groups = [RolloutGroup(NUM_EPISODES * step + i, "", (r,), "") for i, r in rollouts]
            recorder.write(step, PromptProgress(10 * (step + 1), (step, step + 5)), groups)
        recorder.close()
        self._expected: dict[Algorithm, Any] = {}

    def expected(self, algorithm: Algorithm) -> tuple[dict[str, torch.Tensor], list[dict]]:
        if algorithm not in self._expected:
            policy, critic, reference = [
                Qwen3ForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32)
                for name in ("model", "model", "reference")
            ]
            self._expected[algorithm] = train_plainly(
                policy, critic, reference, self.batches, algorithm
            )
        return self._expected[algorithm]

    def case(
        self, name: str, algorithm: Algorithm = TOKEN, dump: str = "", **more: Any
    ) -> dict[str, Any]:
        settings = {
            "job.dump_folder": self.folder / "dump" / (dump or name),
            "model.hf_assets_path": self.folder / "model",
            "training.steps": NUM_STEPS, "training.seq_len": SEQ_LEN, "training.max_norm": MAX_NORM,
            "optimizer.lr": LR, "optimizer.beta2": 0.95, "optimizer.eps": EPS,
            "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 1.0,
            "rollout.replay": self.folder / "rollouts.jsonl", "rollout.max_new_tokens": 16,
            "grpo.prompts_per_step": NUM_EPISODES, "grpo.group_size": 1, "grpo.advantage": "gae",
            "grpo.num_epochs": algorithm.num_epochs, "grpo.mismatch_correction": "none",
            "grpo.kl_coef": KL_COEF, "grpo.kl_in": "reward", "grpo.kl_estimator": "k1",
            "grpo.ref_model_path": self.folder / "reference",
            "critic.lr": CRITIC_LR, "critic.gamma": GAMMA,
            "critic.gae_lambda": LAMBDA, "critic.value_clip": CLIP,
            "critic.whiten": algorithm.whiten,
            "critic.warmup_steps": algorithm.warmup_steps, "critic.level": algorithm.level,
        }  # fmt: skip
        return replay_settings.case(name, settings, more)

    def check(self, name: str, algorithm: Algorithm, dump: str = "") -> None:
        weights, steps = self.expected(algorithm)
        assert_same_weights(self.exported(name), weights, name)
        found = replay_settings.records(self.folder / "dump" / (dump or name))
        assert len(found) == len(steps)
        for mine, plain in zip(found, steps, strict=True):
            for key, value in plain.items():
                assert mine[key] == pytest.approx(value, rel=2e-3, abs=2e-5), (name, key)

    def exported(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def checkpoint(self, dump: str, step: int) -> dict[str, Any]:
        target = self.folder / f"{dump}-{step}.pt"
        dcp_to_torch_save(self.folder / "dump" / dump / "checkpoint" / f"step-{step}", target)
        return torch.load(target, weights_only=False)


def random_batches() -> list[list[tuple[int, Rollout]]]:
    random = np.random.default_rng(0)

    def episode(version: int) -> Rollout:
        def tokens(low: int, high: int) -> np.ndarray:
            return random.integers(3, VOCAB_SIZE, random.integers(low, high)).astype(np.int32)

        prompt, turns = tokens(2, 5), [tokens(1, 4), tokens(1, 3), tokens(2, 5)]
        completion = np.concatenate(turns)
        sampled = np.concatenate([np.full(len(t), i != 1) for i, t in enumerate(turns)])
        logprobs = -random.uniform(3, 5, len(completion)) * sampled
        reward = float(random.uniform())
        made = replay_settings.rollout(prompt, completion, logprobs, version, reward)
        return replace(made, sampled=sampled)

    return [[(i, episode(step)) for i in range(NUM_EPISODES)] for step in range(NUM_STEPS)]


def hidden_of(model: Any, episode: Rollout) -> torch.Tensor:
    """Hidden states that predict the sampled tokens, [sampled, dim]."""
    ids = torch.from_numpy(np.concatenate([episode.prompt_ids, episode.token_ids])).long()
    states = model.model(ids[None]).last_hidden_state[0, len(episode.prompt_ids) - 1 : -1]
    return states[torch.from_numpy(episode.sampled)]


def logprobs_of(model: Any, episode: Rollout) -> torch.Tensor:
    labels = torch.from_numpy(episode.token_ids[episode.sampled]).long()
    logits = model.lm_head(hidden_of(model, episode))
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def decisions_of(episode: Rollout, level: str) -> list[list[int]]:
    """For each decision, its places among the sampled tokens."""
    assert episode.sampled is not None
    places = np.flatnonzero(episode.sampled).tolist()
    found: list[list[int]] = []
    for i, place in enumerate(places):
        if level == "turn" and i and places[i - 1] == place - 1:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def backwards(rewards: list[float], values: list[float], lam: float) -> list[float]:
    advantages, after, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + GAMMA * following - value + GAMMA * lam * after
        following = value
        advantages.append(after)
    return advantages[::-1]


@dataclass
class Estimate:
    """Of one episode: an advantage for each sampled token, and values and targets of decisions."""

    decisions: list[list[int]]
    advantages: torch.Tensor
    values: torch.Tensor
    targets: torch.Tensor


def estimate(
    episode: Rollout, all_values: torch.Tensor, ref: torch.Tensor, a: Algorithm
) -> Estimate:
    decisions = decisions_of(episode, a.level)
    kl = torch.from_numpy(episode.logprobs[episode.sampled]) - ref
    rewards = [-KL_COEF * float(kl[places].double().sum()) for places in decisions]
    assert episode.reward is not None
    rewards[-1] += episode.reward
    values = [float(all_values[places[0]]) for places in decisions]
    by_token = torch.zeros(len(kl))
    for places, advantage in zip(decisions, backwards(rewards, values, LAMBDA), strict=True):
        by_token[places] = advantage
    targets = backwards(rewards, values, 1.0)
    return Estimate(
        decisions, by_token, torch.tensor(values), torch.tensor(targets) + torch.tensor(values)
    )


def train_plainly(
    policy: Any, critic: Any, reference: Any, batches: list, algorithm: Algorithm
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """PPO in one process, one episode at a time."""
    head = torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    critic_parameters = [*critic.model.parameters(), *head.parameters()]
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": EPS, "weight_decay": 0.0}
    of_policy = torch.optim.AdamW(policy.parameters(), lr=LR, **options)
    of_critic = torch.optim.AdamW(critic_parameters, lr=CRITIC_LR, **options)
    steps = []
    for step, batch in enumerate(batches):
        for optimizer, rate in ((of_policy, LR), (of_critic, CRITIC_LR)):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / NUM_STEPS)
        episodes = [episode for _, episode in batch]
        with torch.no_grad():
            old = [logprobs_of(policy, e) for e in episodes]
            found = [
                estimate(e, head(hidden_of(critic, e))[:, 0], logprobs_of(reference, e), algorithm)
                for e in episodes
            ]
        everything = torch.cat([each.advantages for each in found])
        num_tokens = len(everything)
        if algorithm.whiten:
            for each in found:
                scale = (everything.var() + 1e-8).rsqrt()
                each.advantages = (each.advantages - everything.mean()) * scale
        is_alone = step < algorithm.warmup_steps
        norms, losses = [], []
        for _ in range(algorithm.num_epochs):
            of_policy.zero_grad()
            of_critic.zero_grad()
            policy_loss, critic_loss = torch.zeros(()), torch.zeros(())
            for episode, each, old_logprobs in zip(episodes, found, old, strict=True):
                ratio = (logprobs_of(policy, episode) - old_logprobs).exp()
                surrogate = torch.minimum(
                    ratio * each.advantages, ratio.clamp(0.8, 1.2) * each.advantages
                )
                policy_loss = policy_loss - surrogate.sum() / num_tokens
                begins = [places[0] for places in each.decisions]
                sizes = torch.tensor([float(len(places)) for places in each.decisions])
                values = head(hidden_of(critic, episode))[begins, 0]
                held = each.values + (values - each.values).clamp(-CLIP, CLIP)
                errors = torch.maximum((values - each.targets) ** 2, (held - each.targets) ** 2)
                critic_loss = critic_loss + 0.5 * (sizes * errors).sum() / num_tokens
            if not is_alone:
                policy_loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
                of_policy.step()
            critic_loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(critic_parameters, MAX_NORM)
            of_critic.step()
            norms.append(norm.item())
            losses.append(critic_loss.item())
        assert max(norms) > MAX_NORM, "a gradient that is not clipped shows nothing"
        values, targets = (torch.cat([getattr(x, k) for x in found]) for k in ("values", "targets"))
        steps.append(
            {
                "critic/loss": float(np.mean(losses)),
                "critic/grad_norm": float(np.mean(norms)),
                "critic/mean_value": float(values.mean()),
                "critic/mean_return": float(targets.mean()),
                "critic/explained_variance": 1 - float((targets - values).var() / targets.var()),
                "critic/lr": CRITIC_LR * (1 - step / NUM_STEPS),
                "data/trained_tokens": float(num_tokens),
            }
        )
    return replay_settings.hf_weights(policy, tied=True), steps


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("critic"))


CHECKPOINTED = {
    "checkpoint__enable": True, "checkpoint__interval": 2, "checkpoint__last_save_model_only": False,
}  # fmt: skip


def test_one_process_takes_the_steps_of_plain_ppo_and_resumes_to_the_bit(world, run_ranks):
    algorithms = {"turn": TURN, "warm-up": WARM}
    kept: dict[str, Any] = CHECKPOINTED | {"dump": "kept"}
    cases = [
        *(world.case(name, algorithm) for name, algorithm in algorithms.items()),
        world.case("parts", IN_PARTS, rollout__stream=True, rollout__stream_parts=2),
        world.case("kept", **kept),
        world.case("another", **kept, checkpoint__load_step=2, critic__path=world.folder / "model"),
    ]
    (results,) = run_ranks("replayed_runs", 1, folder=str(world.folder), cases=cases)
    for name, algorithm in algorithms.items():
        world.check(name, algorithm)
        skipped = range(1, 1 + algorithm.warmup_steps)
        events = events_of_steps(range(1, 5), updates=2, skipped=skipped)
        assert results[name]["events"] == events, name
    world.check("parts", IN_PARTS)
    assert "critic.path must stay not set" in results["another"]["error"]
    world.check("kept", TOKEN)
    again = world.case("resumed", **kept, checkpoint__load_step=2)
    assert_resumes(
        world, lambda: run_ranks("replayed_runs", 1, folder=str(world.folder), cases=[again])
    )


def assert_resumes(world: World, resume: Callable[[], Any]) -> None:
    """A run that resumes "kept" at its second step as "resumed" ends with the same states."""
    before = world.checkpoint("kept", NUM_STEPS)
    resume()
    after = world.checkpoint("kept", NUM_STEPS)
    of_critic = [key for key in before if key.startswith("critic")]
    assert len(of_critic) == 3, "weights, optimizer and schedule"
    for key in ("model", "optimizer", "lr_scheduler", *of_critic):
        if key in before:
            assert_equal(before[key], after[key], key)
    assert_equal(world.exported("kept"), world.exported("resumed"), "exported")


def assert_equal(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


LAYOUTS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "fsdp": (TOKEN, {"data_parallel_shard_degree": 2}),
    "tensor": (TURN, {"tensor_parallel_degree": 2}),
    "context": (TURN, {"context_parallel_degree": 2}),
}


# Gradients in these layouts are those of `test_critic.py`; the whole runs repeat them.
@pytest.mark.long
def test_two_ranks_take_the_steps_of_plain_ppo(world, run_ranks):
    """Ranks that see no values, or hold the same rows, agree with the others in what is whitened."""
    cases = [
        layout_case(world, name, degrees, algorithm=algorithm)
        for name, (algorithm, degrees) in LAYOUTS.items()
    ]
    results = run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    for name, (algorithm, _) in LAYOUTS.items():
        world.check(name, algorithm)
        for result in results:
            assert result[name]["events"] == events_of_steps(range(1, 5), updates=2), name


def test_a_pipeline_that_trains_both_models_in_one_pass_warms_up_and_resumes(
    tmp_path_factory, run_ranks
):
    """The first pass after the warm-up, and after resuming, trains one model after the other."""
    world = World(tmp_path_factory.mktemp("pipeline"))

    def case(name: str, algorithm: Algorithm = TOKEN, **more: Any) -> dict[str, Any]:
        return layout_case(world, name, PIPELINE, algorithm=algorithm, **more)

    kept: dict[str, Any] = CHECKPOINTED | {"dump": "kept"}
    cases = [case("kept", **kept), case("warm-up", WARM)]
    results = run_ranks("replayed_runs", 2, folder=str(world.folder), cases=cases)
    world.check("kept", TOKEN)
    world.check("warm-up", WARM)
    for result in results:
        events = events_of_steps(range(1, 5), updates=2, skipped=range(1, 3))
        assert result["warm-up"]["events"] == events
    again = case("resumed", **kept, checkpoint__load_step=2)
    assert_resumes(
        world, lambda: run_ranks("replayed_runs", 2, folder=str(world.folder), cases=[again])
    )
