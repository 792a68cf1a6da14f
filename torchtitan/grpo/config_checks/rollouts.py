# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks batches and rollouts."""

from torchtitan.grpo.config.environments import environments_of, own_key
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks.rules import check_file, forbid, get, refusing, require
from torchtitan.grpo.rollout.agents.function_worker import BUILTIN as AGENTS
from torchtitan.grpo.rollout.environments.player import BUILTIN
from torchtitan.grpo.system.functions import split_path


def longest_sequence(config: JobConfig) -> int:
    """Returns the largest number of tokens of a prompt with its completion, or of a supervised example."""
    seq_len = config.training.seq_len
    if config.sft.path is not None:
        return min(seq_len, config.sft.max_example_tokens or seq_len)
    owns = environments_of(config).values()
    if any(own.prompts.max_prompt_tokens == 0 for own in owns):
        return seq_len
    longest = max(own.prompts.max_prompt_tokens + own.rollout.max_new_tokens for own in owns)
    return min(seq_len, longest)


def check_lengths(config: JobConfig) -> None:
    if config.sft.path is not None:
        return  # examples that do not fit are left out
    require(
        config.rollout.max_new_tokens < config.training.seq_len,
        f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) must leave room for a prompt in "
        f"training.seq_len ({config.training.seq_len}). Lower rollout.max_new_tokens or raise "
        "training.seq_len.",
    )
    served, longest = config.inference.max_model_len, longest_sequence(config)
    require(
        served == 0 or served >= longest,
        f"inference.max_model_len must be 0 (training.seq_len) or at least {longest}, got {served}: "
        "servers must fit the longest prompt (prompts.max_prompt_tokens, or what training.seq_len "
        "leaves) with rollout.max_new_tokens.",
    )


def length_warnings(config: JobConfig) -> list[str]:
    """Returns a warning for each environment whose longest prompt leaves too few tokens for an answer."""
    found, seq_len = [], config.training.seq_len
    for name, own in environments_of(config).items() if config.has_servers else ():
        prompt, answer = own.prompts.max_prompt_tokens, own.rollout.max_new_tokens
        if prompt and prompt + answer > seq_len:
            found.append(
                f"{own_key(name, 'prompts.max_prompt_tokens')} ({prompt}) plus "
                f"{own_key(name, 'rollout.max_new_tokens')} ({answer}) is more than training.seq_len "
                f"({seq_len}): answers to the longest prompts are cut after {max(seq_len - prompt, 1)} "
                "tokens. Raise training.seq_len, or lower one of the others."
            )
    return found


def check_data(config: JobConfig) -> None:
    grpo, rollout = config.grpo, config.rollout
    require(
        rollout.record is None or rollout.replay is None,
        "Set rollout.record or rollout.replay, not both, because replayed rollouts are recorded "
        f"already, got {rollout.record!r} and {rollout.replay!r}.",
    )
    check_file("rollout.replay", rollout.replay)
    if not config.prompts.single_rank_load:
        keys = ("rollout.record", "rollout.replay", "grpo.ptx_path")
        forbid(
            "prompts.single_rank_load = false",
            {key: get(config, key) is not None for key in keys},
            "the former leaves the tokens in the rollout process, and the latter needs them on rank 0. "
            "Remove the latter, or set prompts.single_rank_load = true.",
        )
    require(
        grpo.num_minibatches <= grpo.prompts_per_step or not config.has_servers,
        "grpo.num_minibatches must be at most grpo.prompts_per_step "
        f"({grpo.prompts_per_step}), because prompt groups stay whole, got {grpo.num_minibatches}.",
    )
    check_file("grpo.ptx_path", grpo.ptx_path)
    require(
        grpo.ptx_path is None or grpo.ptx_per_step >= grpo.num_minibatches,
        f"grpo.ptx_per_step must be at least grpo.num_minibatches ({grpo.num_minibatches}), because "
        f"each minibatch needs a supervised example, got {grpo.ptx_per_step}.",
    )
    require(
        grpo.ptx_path is None or rollout.temperature == 1,
        f"grpo.ptx_path needs rollout.temperature = 1, got {rollout.temperature}: the trainer "
        "computes the log-probabilities of all tokens at that temperature, and supervised training "
        "would fit the tempered distribution instead of the model's own.",
    )


def check_filters(config: JobConfig) -> None:
    rollout, grpo = config.rollout, config.grpo
    batch = grpo.prompts_per_step * grpo.group_size
    limit = rollout.buffer_size_limit
    require(
        limit == 0 or limit >= batch,
        "rollout.buffer_size_limit must be 0 (twice a batch) or at least one batch "
        f"(grpo.prompts_per_step * grpo.group_size = {batch}), got {limit}: a smaller buffer could "
        "never hold a whole batch.",
    )
    require(
        rollout.min_completion_tokens <= rollout.max_new_tokens,
        f"rollout.min_completion_tokens must be at most rollout.max_new_tokens "
        f"({rollout.max_new_tokens}), got {rollout.min_completion_tokens}: no completion would be "
        "kept.",
    )
    require(
        not (rollout.dynamic_sampling and grpo.filter_zero_advantage),
        "rollout.dynamic_sampling and grpo.filter_zero_advantage cannot be combined: both leave out "
        "groups with equal rewards, and groups that the former keeps because of its limit would be "
        "dropped by the latter. Set one of them.",
    )
    require(
        rollout.overdue != "resume" or rollout.segment_tokens > 0,
        'rollout.overdue = "resume" keeps the finished segments of a completion, but '
        "with rollout.segment_tokens = 0 completions are generated whole. Set "
        f"rollout.segment_tokens below rollout.max_new_tokens ({rollout.max_new_tokens}).",
    )
    has_turns = rollout.environment is not None or config.agent.is_used
    require(
        rollout.overdue != "resume" or not has_turns,
        'rollout.overdue = "resume" interrupts completions in the middle of a turn and '
        "cannot be combined with rollout.environment or with [agent]. Set rollout.overdue to "
        '"wait" or "drop".',
    )
    if rollout.dynamic_sampling:
        require(
            grpo.group_size > 1,
            "rollout.dynamic_sampling compares the rewards of a group and needs grpo.group_size of "
            "at least 2, got 1.",
        )
    require(
        not (config.has_servers and rollout.longest_first) or grpo.prompts_per_step > 1,
        "rollout.longest_first orders the prompts of a batch and has no effect with "
        f"grpo.prompts_per_step = {grpo.prompts_per_step}. Leave it at false.",
    )
    if rollout.should_accept is not None:
        require(
            bool(rollout.should_accept.strip()),
            "rollout.should_accept must name a function, got an empty string. Name one, or remove it.",
        )


def check_stream(config: JobConfig) -> None:
    """Refuses ``rollout.stream`` with settings that need the whole batch before its gradient."""
    rollout, grpo = config.rollout, config.grpo
    if not rollout.stream:
        return
    most = grpo.prompts_per_step
    require(
        rollout.stream_parts <= most,
        f"rollout.stream_parts must be at most grpo.prompts_per_step ({most}), because prompt groups "
        f"stay whole, got {rollout.stream_parts}. Lower it, or leave rollout.stream at false.",
    )
    needs_all = {
        f"grpo.num_minibatches = {grpo.num_minibatches}": grpo.num_minibatches > 1,
        f"grpo.num_epochs = {grpo.num_epochs}": grpo.num_epochs > 1,
        'grpo.advantage = "batch_norm"': grpo.advantage == "batch_norm",
        "grpo.ptx_path": grpo.ptx_path is not None,
        "critic.whiten = true": config.has_critic and config.critic.whiten,
        "prompts.single_rank_load = false": not config.prompts.single_rank_load,
    }
    forbid(
        "rollout.stream",
        needs_all,
        "the former computes gradients before the batch is complete, and the latter needs the whole "
        "batch first. Remove one of them.",
    )


def check_environments(config: JobConfig) -> None:
    rollout, functions = config.rollout, config.reward.functions
    if rollout.environment is None:
        require(
            "environment" not in functions or not config.has_servers or config.agent.is_used,
            "reward.functions names the built-in 'environment', which returns the reward of "
            "rollout.environment, but rollout.environment is not set. Set it, or name another "
            "reward function.",
        )
        return
    require(
        rollout.environment != "verifiers",
        "rollout.environment = 'verifiers' ran environments of verifiers before 0.4. Environments of "
        'later releases are agents: set agent.function = "verifiers" and agent.options, and unset '
        "rollout.environment.",
    )
    if rollout.environment not in BUILTIN:
        with refusing():
            split_path(rollout.environment, "rollout.environment", BUILTIN)
    require(
        not rollout.ignore_eos or bool(rollout.stop_token_ids),
        "rollout.environment with rollout.ignore_eos needs rollout.stop_token_ids, because a turn "
        "ends with a stop token. Set them, or leave rollout.ignore_eos at false.",
    )


def check_agent(config: JobConfig) -> None:
    agent, rollout = config.agent, config.rollout
    if not agent.is_used:
        require(
            "agent" not in config.reward.functions or not config.has_servers,
            "reward.functions names the built-in 'agent', which returns the reward of an agent, but "
            "neither agent.command nor agent.function is set. Set one, or name another reward function.",
        )
        return
    forbid(
        "agent.command" if agent.command else "agent.function",
        {
            "agent.function": bool(agent.command) and agent.function is not None,
            "rollout.environment": rollout.environment is not None,
            "teacher.urls": bool(config.teacher.urls),
        },
        "a completion is driven by one program, and a teacher rates only what it can read from its "
        "beginning. Remove one of them.",
    )
    if agent.function is not None and agent.function not in AGENTS:
        with refusing():
            split_path(agent.function, "agent.function", AGENTS)


def check_determinism(config: JobConfig) -> None:
    """Refuses ``rollout.deterministic`` with settings under which timing decides what is sampled."""
    rollout, inference = config.rollout, config.inference
    if rollout.deterministic:
        needed = {
            "rollout.max_head_offpolicyness = 0": rollout.max_head_offpolicyness == 0,
            "inference.launch = true": inference.launch,
            'inference.kind = "embedded"': inference.kind == "embedded",
            "rollout.environment unset": rollout.environment is None,
            "agent.command and agent.function unset": not config.agent.is_used,
            "rollout.dynamic_sampling = false": not rollout.dynamic_sampling,
            "rollout.stream = false": not rollout.stream,
        }
        for setting, holds in needed.items():
            require(
                holds,
                f"rollout.deterministic = true needs {setting}: otherwise what is sampled, or what is "
                "trained together, depends on timing. Set it, or leave rollout.deterministic at false.",
            )
