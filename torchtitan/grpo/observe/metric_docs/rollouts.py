# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of rewards, rollouts, servers and environments."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

REWARDS = Section(
    "Rewards",
    "Computed from the rollouts of the step's batch. Each reward function has a metric of its own name.",
    (
        Metric(
            "reward/mean", "reward",
            "Mean reward: the sum of the reward functions, weighted by `reward.weights`.",
            "rises over tens of steps, with noise between steps",
            "Read `reward/equal_groups_fraction` first, then samples. If it falls, lower `optimizer.lr`.",
        ),
        Metric(
            "reward/std", "reward",
            "Standard deviation of the rewards of all samples of the batch, over groups as well.",
            "above 0",
            "At 0 all samples earned the same; see `reward/equal_groups_fraction`.",
        ),
        Metric(
            "reward/{function}", "reward",
            "Mean value of one reward function before its weight, over the samples to which it applies. A "
            "function that shares its name with another one is named by its path.",
            "each rises, or is at its best value",
            "If one rises while another falls, they conflict: change `reward.weights`.",
        ),
        Metric(
            "reward/equal_groups", "groups",
            "Groups of the batch whose rewards, as they are trained (after `grpo.overlong_penalty` and "
            "scaling), are all equal. With groups of one sample, the whole batch is compared.",
            "less than half of `grpo.prompts_per_step`",
            "See `reward/equal_groups_fraction`.",
        ),
        Metric(
            "reward/equal_groups_fraction", "fraction",
            "Share of such groups. Their advantages are 0, and nothing is learned from them.",
            "below 0.5; it rises as the task is solved",
            "At 1 for five steps the run says that nothing is learned, with likely causes: a constant reward, "
            "completions that are messages and not strings, all cut off at `rollout.max_new_tokens`, a task "
            "too easy or too hard. Between: choose prompts of medium difficulty, raise `grpo.group_size`, or "
            "set `rollout.dynamic_sampling`.",
        ),
    ),
)  # fmt: skip

LENGTHS = Section(
    "Answers",
    "Lengths count the tokens that the model wrote, not those that an environment inserted.",
    (
        Metric(
            "rollout/completion_tokens_mean", "tokens", "Mean length of the batch's completions.",
            "well below `rollout.max_new_tokens`",
            "If it grows without an end, use `grpo.overlong_penalty`; if it collapses, look at samples.",
        ),
        Metric(
            "rollout/completion_tokens_min", "tokens", "Length of the shortest completion.",
            "several tokens",
            "At 1 some completions end at once: check the chat template and `rollout.stop_token_ids`.",
        ),
        Metric(
            "rollout/completion_tokens_max", "tokens", "Length of the longest completion.",
            "below `rollout.max_new_tokens`",
            "If it is the limit in every step, read `rollout/length_fraction`.",
        ),
        Metric(
            "rollout/length_fraction", "fraction",
            "Share of completions that were cut off at `rollout.max_new_tokens`.",
            "below 0.1",
            "Raise `rollout.max_new_tokens` (and `training.seq_len`), or check that the model stops: chat "
            "template, end token.",
        ),
    ),
)  # fmt: skip

COUNTS = Section(
    "What is left out",
    "Counts since the previous batch, of groups unless the name says otherwise. The step's line shows those that "
    "are not 0.",
    (
        Metric(
            "rollout/prompts_too_long", "prompts", "Prompts longer than `prompts.max_prompt_tokens`.", "0",
            "Raise `prompts.max_prompt_tokens` and `training.seq_len`.",
        ),
        Metric(
            "rollout/rewards_raised", "groups", "Groups whose reward function raised an exception.", "0",
            "The console names the function and the line of the first; mend it.",
        ),
        Metric(
            "rollout/rewards_timed_out", "groups",
            "Groups whose scoring took longer than `reward.timeout_seconds`.", "0",
            "Raise `reward.timeout_seconds` or `reward.num_workers`.",
        ),
        Metric(
            "rollout/rewards_unusable", "groups",
            "Groups whose reward function returned no usable number, or ended its process.", "0",
            "The console has the reason of the first.",
        ),
        Metric(
            "rollout/episodes_failed", "completions",
            "Completions whose environment raised, hung, or ended its process.", "0",
            "The console has the reason of the first.",
        ),
        Metric(
            "rollout/requests_refused", "requests",
            "Requests that a server answered with 4xx, most often because of their length.", "0",
            "The console has the server's text.",
        ),
        Metric(
            "rollout/requests_unanswered", "requests",
            "Requests that a server answered with 5xx, not in time, or not at all. They are made again, and "
            "nothing is lost.", "0",
            "Read the server's log; raise `rollout.request_timeout_seconds` if it is slow.",
        ),
        Metric(
            "rollout/logprobs_unusable", "requests",
            "Answers without a finite log-probability of each token.", "0",
            "Start vLLM with `--logprobs-mode processed_logprobs`, as `scripts/serve_vllm.sh` does.",
        ),
        Metric(
            "rollout/answers_unusable", "requests",
            "Answers that contradict the request or themselves in another way.", "0",
            "The console has the reason of the first; a proxy may change answers.",
        ),
        Metric(
            "rollout/answers_cut_by_a_server", "requests",
            "Answers that a server ended before `rollout.max_new_tokens`, because its longest sequence is too "
            "short.", "0",
            "Serve with a larger `--max-model-len`, or lower `prompts.max_prompt_tokens`.",
        ),
        Metric(
            "rollout/heldout_unscored", "prompts",
            "Completions of held-out prompts that got no score in an evaluation, those of prompts that are too long included.", "0",
            "The console has the reason of the first.",
        ),
        Metric(
            "rollout/failed_groups", "groups", "Groups with too few usable completions from the servers.",
            "0", "Read `rollout_process.log` and the servers' logs.",
        ),
        Metric(
            "rollout/unscored_groups", "groups",
            "Groups whose scoring raised, hung, or returned no usable number.", "0",
            "`rollout_process.log` has the traceback.",
        ),
        Metric(
            "rollout/filtered_groups", "groups",
            "Groups that a filter left out: `rollout.min_completion_tokens`, `rollout.drop_truncated`, "
            "`rollout.should_accept`, `rollout.dynamic_sampling`.",
            "as you intend", "Generation for these groups is lost; loosen the filter.",
        ),
        Metric(
            "rollout/equal_groups_dropped", "groups",
            "Those of them that `rollout.dynamic_sampling` left out because their rewards are all equal.",
            "less than a batch", "As for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "rollout/expired_groups", "groups",
            "Groups with tokens older than the version that their server was attested to serve.", "0",
            "A server restarted with old weights or does not serve what it says; read its log.",
        ),
        Metric(
            "rollout/overdue_groups", "groups",
            "Groups that held up a batch and were given up (`rollout.overdue = \"drop\"`).", "few",
            "Raise `rollout.max_head_offpolicyness`, or use `rollout.overdue = \"resume\"`.",
        ),
        Metric(
            "rollout/failed_requests", "requests",
            "Requests that a server did not answer with a usable completion; each is repeated once.", "0",
            "`rollout_process.log` names the server and the reason.",
        ),
        Metric(
            "rollout/cut_rollouts", "completions",
            "Completions that were ended early (`rollout.overdue = \"cut\"`).", "few",
            "As for `rollout/overdue_groups`.",
        ),
        Metric(
            "rollout/resumed_groups", "groups",
            "Groups that were started again with their tokens as context (`rollout.overdue = \"resume\"`).",
            "few", "As for `rollout/overdue_groups`.",
        ),
    ),
)  # fmt: skip

GENERATION = Section(
    "Generation",
    "The state of the rollout process when the batch was delivered, and shares of the time since the batch before.",
    (
        Metric(
            "rollout/tokens_per_second", "tokens/s", "Tokens generated by all servers.",
            "at least `time/trained_tokens_per_second`",
            "Add servers, or raise `rollout.max_concurrent_rollouts`.",
        ),
        Metric(
            "rollout/buffer_groups", "groups", "Finished groups that wait for later batches.",
            "some, with `rollout.max_head_offpolicyness` above 0",
            "Always 0 while the trainer waits: generation is the bottleneck.",
        ),
        Metric(
            "rollout/inflight_rollouts", "completions", "Completions that are being generated.",
            "near `rollout.max_concurrent_rollouts`",
            "Read `rollout/wait_trainer_fraction` and the servers' `window`.",
        ),
        Metric(
            "rollout/idle_fraction", "fraction",
            "Share of time in which nothing was generated: no completion was in flight, or no server was ready.",
            "near 0; in synchronous training the share of the training itself",
            "Raise `rollout.max_head_offpolicyness`. At a restart or a lost server, read its log.",
        ),
        Metric(
            "rollout/wait_trainer_fraction", "fraction",
            "Share of time in which a server had room, but no prompt might start before the trainer took a "
            "batch or sent new weights, while the trainer was busy. As far as the rollout process knows: a "
            "server may also be slow by itself.",
            "below 0.2",
            "The trainer is the bottleneck: give it more devices, or raise `rollout.max_head_offpolicyness`.",
        ),
        Metric(
            "rollout/hedged_completions", "completions",
            "Completions of the whole run that were also asked from a second server (`rollout.hedge_seconds`).",
            "few", "Raise `rollout.hedge_seconds`.",
        ),
        Metric(
            "rollout/hedges_won", "completions", "Those of them that the second server finished first.",
            "about half of them", "If there are none, hedging only costs: turn it off.",
        ),
        Metric(
            "rollout/loop_lag_p50_ms", "ms",
            "Median delay of the rollout process's event loop over the last minute.", "below 10", "As below.",
        ),
        Metric(
            "rollout/loop_lag_p99_ms", "ms", "99th percentile of that delay.", "below 100",
            "The process lacks a core: leave it one, or use fewer `reward.num_workers`.",
        ),
        Metric(
            "rollout/loop_lag_max_ms", "ms", "Longest such delay since the last batch.", "below 1000",
            "As above.",
        ),
    ),
)  # fmt: skip

SERVERS = Section(
    "Servers",
    "The work of each server; `{address}` is its host and port. `running`, `waiting` and `kv_use` are what the server "
    "itself reports, and are absent until it does.",
    (
        Metric(
            "servers/{address}/inflight_rollouts", "completions", "Completions in flight on the server.",
            "similar on equal servers", "A server with 0 is lost or not attested; read `weight_sync`.",
        ),
        Metric(
            "servers/{address}/window", "completions",
            "Completions that the server is given at once (`rollout.adaptive_concurrency`).",
            "stable or rising", "It shrinks when the server is overloaded or fails; read its log.",
        ),
        Metric(
            "servers/{address}/running", "completions", "Completions that the server computes now.",
            "above 0", "At 0 with `waiting` above 0 the server is stuck.",
        ),
        Metric(
            "servers/{address}/waiting", "completions", "Completions that wait inside the server.",
            "near 0", "Lower `rollout.max_concurrent_rollouts`, or give the server more memory.",
        ),
        Metric(
            "servers/{address}/kv_use", "fraction", "Used part of the server's key-value cache.",
            "below 0.95", "Lower `rollout.max_concurrent_rollouts`, or give the server more memory.",
        ),
    ),
)  # fmt: skip

ENVIRONMENTS = Section(
    "Environments",
    "Present with `rollout.environment`. Counts and means over the whole run.",
    (
        Metric(
            "environment/step_seconds", "s", "Mean time of one call of `step`.",
            "far below the time that a turn takes to generate",
            "Make the environment faster, or raise `rollout.environment_workers`.",
        ),
        Metric(
            "environment/failed_episodes", "episodes", "Episodes that raised or timed out.", "0",
            "`rollout_process.log` has the reason.",
        ),
        Metric(
            "environment/timeouts", "episodes",
            "Those of them that exceeded `rollout.environment_timeout_seconds`.", "0",
            "Raise the limit, or find the call that hangs.",
        ),
        Metric(
            "environment/replayed_turns", "turns",
            "Turns given again to a new environment after its process ended.", "0",
            "A worker is killed or crashes; read `rollout_process.log`.",
        ),
        Metric(
            "environment/restarted_completions", "completions",
            "Completions begun again because their environment did not repeat its answers.", "0",
            "Make the environment deterministic, or find out why its process ends.",
        ),
        Metric(
            "environment/rewritten_contexts", "turns",
            "Turns before which the chat template had changed earlier ones, so that they begin a training row of their own "
            "(`rollout.earlier_turns`).",
            "0, or each turn but the first if the template leaves out thinking",
            "If it is not 0 with a template that leaves nothing out, the model writes what the template renders otherwise, such as spaces.",
        ),
    ),
)  # fmt: skip

ROLLOUTS = (REWARDS, LENGTHS, COUNTS, GENERATION, SERVERS, ENVIRONMENTS)
