# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Descriptions of the metrics of rewards, rollouts, servers and environments."""

from torchtitan.grpo.observe.metric_docs.entry import Metric, Section

REWARDS = Section(
    "Rewards",
    "These metrics are computed from the rollouts of the step's batch. Each reward function has a metric of its own.",
    (
        Metric(
            "reward/mean", "reward",
            "Mean reward. A reward is the sum of the reward functions, weighted by `reward.weights`.",
            "rises over tens of steps, with noise between steps",
            "Check `reward/equal_groups_fraction` first, then read `samples.jsonl`. If it falls, lower `optimizer.lr`.",
        ),
        Metric(
            "reward/std", "reward",
            "Standard deviation of the rewards of all samples of the batch, within and across groups.",
            "above 0",
            "If it is 0, all samples received the same reward; see `reward/equal_groups_fraction`.",
        ),
        Metric(
            "reward/{function}", "reward",
            "Mean value of one reward function before weighting, over the samples to which it applies. If two functions "
            "have the same name, each is named by its path.",
            "each rises, or is at its best value",
            "If one rises while another falls, they conflict: change `reward.weights`.",
        ),
        Metric(
            "reward/file/{file}", "reward",
            "Mean reward of the prompts of one of `prompts.paths`, if the batch has any. `{file}` is the name of the file "
            "without its extension, and with the folders that tell it apart from files of the same name.",
            "each rises",
            "If one stays at its least value, its prompts teach nothing: lower its entry of `prompts.weights`.",
        ),
        Metric(
            "reward/equal_groups", "groups",
            "Number of groups of the batch in which all rewards are equal. The rewards are compared as they are used for "
            "training (after `grpo.overlong_penalty` and scaling). With groups of one sample, the whole batch is compared.",
            "less than half of `grpo.prompts_per_step`",
            "See `reward/equal_groups_fraction`.",
        ),
        Metric(
            "reward/equal_groups_fraction", "fraction",
            "Fraction of groups in which all rewards are equal. Their advantages are 0, so nothing is learned from them.",
            "below 0.5; it rises as the task is solved",
            "If it is 1 for five steps, the run reports that nothing is learned and lists likely causes: a constant reward, "
            "completions that are messages and not strings, completions that are all truncated at "
            "`rollout.max_new_tokens`, or a task that is too easy or too hard. If it is high but below 1, choose prompts of "
            "medium difficulty, raise `grpo.group_size`, or set `rollout.dynamic_sampling`.",
        ),
    ),
)  # fmt: skip

LENGTHS = Section(
    "Completion lengths",
    "Lengths count the tokens that the model generated, without those that an environment inserted.",
    (
        Metric(
            "rollout/completion_tokens_mean", "tokens", "Mean length of the batch's completions.",
            "well below `rollout.max_new_tokens`",
            "If it keeps growing, set `grpo.overlong_buffer`; if it collapses, read `samples.jsonl`.",
        ),
        Metric(
            "rollout/completion_tokens_min", "tokens", "Length of the shortest completion.",
            "several tokens",
            "If it is 1, some completions end immediately: check the chat template and `rollout.stop_token_ids`.",
        ),
        Metric(
            "rollout/completion_tokens_max", "tokens", "Length of the longest completion.",
            "below `rollout.max_new_tokens`",
            "If it equals `rollout.max_new_tokens` in every step, check `rollout/length_fraction`.",
        ),
        Metric(
            "rollout/length_fraction", "fraction",
            "Fraction of completions that were truncated at `rollout.max_new_tokens`.",
            "below 0.1",
            "Raise `rollout.max_new_tokens` (and `training.seq_len`), or check why the model does not stop: look at the chat "
            "template and the end-of-sequence token.",
        ),
        Metric(
            "rollout/file/{file}/completion_tokens_mean", "tokens",
            "Mean length of the completions of one of `prompts.paths`, if the batch has any.",
            "well below `rollout.max_new_tokens`",
        ),
        Metric(
            "rollout/file/{file}/fraction", "fraction",
            "Fraction of the batch's groups that are from one of `prompts.paths`.",
            "near the share of its entry of `prompts.weights`",
            "If it is lower, its groups are dropped more often than others; see the metrics of dropped prompts.",
        ),
    ),
)  # fmt: skip

COUNTS = Section(
    "Dropped prompts, completions and requests",
    "Each metric is a count since the previous batch. The console shows the counts that are not 0 after the line of a "
    "step, except `rollout/failed_requests`, `rollout/equal_groups_dropped` and `rollout/resumed_groups`.",
    (
        Metric(
            "rollout/prompts_too_long", "prompts", "Prompts that are longer than `prompts.max_prompt_tokens`.", "0",
            "Raise `prompts.max_prompt_tokens` and `training.seq_len`.",
        ),
        Metric(
            "rollout/prompts_unusable", "prompts",
            "Rows that are no prompt, in a data set that is too large to be checked in full before training.", "0",
            "The console names the first such row of each file. Mend it.",
        ),
        Metric(
            "rollout/rewards_raised", "groups", "Groups whose reward function raised an exception.", "0",
            "Fix the function; for the first such group, the console names it and the line that raised.",
        ),
        Metric(
            "rollout/rewards_timed_out", "groups",
            "Groups whose scoring took longer than `reward.timeout_seconds`.", "0",
            "Raise `reward.timeout_seconds` or `reward.num_workers`.",
        ),
        Metric(
            "rollout/rewards_unusable", "groups",
            "Groups whose reward function returned no usable number, or ended its process.", "0",
            "The console shows the reason for the first one.",
        ),
        Metric(
            "rollout/episodes_failed", "completions",
            "Completions whose environment raised an exception, hung, or ended its process.", "0",
            "The console shows the reason for the first one.",
        ),
        Metric(
            "rollout/requests_refused", "requests",
            "Requests to which a server responded with a 4xx status, most often because of their length.", "0",
            "The console shows the server's message.",
        ),
        Metric(
            "rollout/requests_unanswered", "requests",
            "Requests to which a server responded with a 5xx status, too late, or not at all. A request is sent a second "
            "time; if it fails again, its completion is dropped.", "0",
            "Check the log of the server. If it is slow, raise `rollout.request_timeout_seconds`.",
        ),
        Metric(
            "rollout/logprobs_unusable", "requests",
            "Responses that do not have a finite log-probability for each token.", "0",
            "Start vLLM with `--logprobs-mode processed_logprobs`, as `scripts/serve_vllm.sh` does.",
        ),
        Metric(
            "rollout/answers_unusable", "requests",
            "Responses that contradict the request or themselves in any other way.", "0",
            "The console shows the reason for the first one. A proxy may modify the responses.",
        ),
        Metric(
            "rollout/answers_cut_by_a_server", "requests",
            "Completions that a server ended before `rollout.max_new_tokens`, because the maximum sequence length of the "
            "server is too short.", "0",
            "Start the server with a larger `--max-model-len`, or lower `prompts.max_prompt_tokens`.",
        ),
        Metric(
            "rollout/heldout_unscored", "completions",
            "Completions of held-out prompts that received no score in an evaluation, including those of prompts that are "
            "too long.", "0",
            "The console shows the reason for the first one.",
        ),
        Metric(
            "rollout/failed_groups", "groups", "Groups that received too few usable completions from the servers.",
            "0", "Check `rollout_process.log` and the logs of the servers.",
        ),
        Metric(
            "rollout/unscored_groups", "groups",
            "Groups whose scoring raised an exception, hung, or returned no usable number.", "0",
            "`rollout_process.log` has the traceback.",
        ),
        Metric(
            "rollout/filtered_groups", "groups",
            "Groups that were removed by a filter: `rollout.min_completion_tokens`, `rollout.drop_truncated`, "
            "`rollout.should_accept`, or `rollout.dynamic_sampling`.",
            "as you intend", "Loosen the filter; the generation work for these groups is wasted.",
        ),
        Metric(
            "rollout/equal_groups_dropped", "groups",
            "Groups that `rollout.dynamic_sampling` removed because all their rewards are equal. They are also counted in "
            "`rollout/filtered_groups`.",
            "less than a batch", "Take the same measures as for `reward/equal_groups_fraction`.",
        ),
        Metric(
            "rollout/expired_groups", "groups",
            "Groups with tokens from a version older than the one that their server was attested to serve.", "0",
            "The server restarted with old weights, or does not serve the version that it reports; check its log.",
        ),
        Metric(
            "rollout/overdue_groups", "groups",
            "Groups that delayed a batch and were dropped (`rollout.overdue = \"drop\"`).", "few",
            "Raise `rollout.max_head_offpolicyness`, or set `rollout.overdue = \"resume\"`.",
        ),
        Metric(
            "rollout/failed_requests", "requests",
            "Requests that a server did not answer with a usable completion. A failed request is sent a second time; if "
            "the server was lost, the request is sent until another server answers.", "0",
            "`rollout_process.log` names the server and the reason.",
        ),
        Metric(
            "rollout/cut_rollouts", "completions",
            "Completions that were ended early (`rollout.overdue = \"cut\"`).", "few",
            "Raise `rollout.max_head_offpolicyness`, or set `rollout.overdue = \"resume\"`.",
        ),
        Metric(
            "rollout/resumed_groups", "groups",
            "Groups that were restarted with their generated tokens as context (`rollout.overdue = \"resume\"`).",
            "few", "Raise `rollout.max_head_offpolicyness`.",
        ),
    ),
)  # fmt: skip

GENERATION = Section(
    "Generation",
    "The state of the rollout process when it delivered the batch, and rates and fractions of the time since the previous "
    "batch.",
    (
        Metric(
            "rollout/tokens_per_second", "tokens/s", "Throughput of generation: tokens generated by all servers.",
            "at least `time/trained_tokens_per_second`",
            "Add servers, or raise `rollout.max_concurrent_rollouts`.",
        ),
        Metric(
            "rollout/buffer_groups", "groups", "Number of finished groups that wait for later batches.",
            "some, with `rollout.max_head_offpolicyness` above 0",
            "If it is always 0 while the trainer waits, generation is the bottleneck.",
        ),
        Metric(
            "rollout/inflight_rollouts", "completions", "Number of completions that are being generated.",
            "near `rollout.max_concurrent_rollouts`",
            "Check `rollout/wait_trainer_fraction` and the `window` of the servers.",
        ),
        Metric(
            "rollout/idle_fraction", "fraction",
            "Fraction of time in which nothing was generated, because no completion was in flight or no server was ready.",
            "near 0; in synchronous training, the fraction of time spent on training",
            "Raise `rollout.max_head_offpolicyness`. If a server was restarted or lost, check its log.",
        ),
        Metric(
            "rollout/wait_trainer_fraction", "fraction",
            "Fraction of time in which the trainer was busy and a server had room, but no prompt could start before the "
            "trainer took a batch or sent new weights. This is the view of the rollout process; a slow weight transfer to "
            "a server is counted as well.",
            "below 0.2",
            "The trainer is the bottleneck: give it more devices, or raise `rollout.max_head_offpolicyness`.",
        ),
        Metric(
            "rollout/hedged_completions", "completions",
            "Number of completions in the whole run that were also requested from a second server (`rollout.hedge_seconds`).",
            "few", "Raise `rollout.hedge_seconds`.",
        ),
        Metric(
            "rollout/hedges_won", "completions", "Number of hedged completions that the second server finished first.",
            "about half of `rollout/hedged_completions`",
            "If it stays 0, hedging only adds load: set `rollout.hedge_seconds = 0`.",
        ),
        Metric(
            "rollout/loop_lag_p50_ms", "ms",
            "Median delay of the rollout process's event loop over the last minute.", "below 10",
            "The process needs a CPU core: reserve one for it, or lower `reward.num_workers`.",
        ),
        Metric(
            "rollout/loop_lag_p99_ms", "ms",
            "99th percentile of the delay of the rollout process's event loop over the last minute.", "below 100",
            "The process needs a CPU core: reserve one for it, or lower `reward.num_workers`.",
        ),
        Metric(
            "rollout/loop_lag_max_ms", "ms",
            "Longest delay of the rollout process's event loop since the last batch.", "below 1000",
            "The process needs a CPU core: reserve one for it, or lower `reward.num_workers`.",
        ),
    ),
)  # fmt: skip

SERVERS = Section(
    "Servers",
    "The work of each server; `{address}` is its host and port. `running`, `waiting` and `kv_use` are reported by the "
    "server itself, and are absent until it reports them.",
    (
        Metric(
            "servers/{address}/inflight_rollouts", "completions", "Number of completions in flight on the server.",
            "similar on equal servers",
            "A server that stays at 0 is lost or not attested; check the `weight_sync` metrics.",
        ),
        Metric(
            "servers/{address}/window", "completions",
            "Maximum number of completions that the server is given at once (`rollout.adaptive_concurrency`).",
            "stable or rising", "It shrinks when the server is overloaded or fails; check the log of the server.",
        ),
        Metric(
            "servers/{address}/running", "completions", "Number of completions that the server is computing.",
            "above 0", "If it is 0 while `waiting` is above 0, the server is stuck.",
        ),
        Metric(
            "servers/{address}/waiting", "completions", "Number of completions in the server's queue.",
            "near 0", "Lower `rollout.max_concurrent_rollouts`, or give the server more memory.",
        ),
        Metric(
            "servers/{address}/kv_use", "fraction", "Fraction of the server's KV cache in use.",
            "below 0.95", "Lower `rollout.max_concurrent_rollouts`, or give the server more memory.",
        ),
    ),
)  # fmt: skip

ENVIRONMENTS = Section(
    "Environments",
    "These metrics are present with `rollout.environment`. Counts and means cover the whole run.",
    (
        Metric(
            "environment/step_seconds", "s", "Mean duration of a call of `step`.",
            "far below the time that it takes to generate a turn",
            "Make the environment faster, or raise `rollout.environment_workers`.",
        ),
        Metric(
            "environment/failed_episodes", "episodes",
            "Number of episodes that failed: the environment raised an exception, timed out, ended its process, or returned "
            "an invalid observation.", "0",
            "`rollout_process.log` has the reason.",
        ),
        Metric(
            "environment/timeouts", "episodes",
            "Number of failed episodes in which a call exceeded `rollout.environment_timeout_seconds`.", "0",
            "Raise the limit, or find the call that hangs.",
        ),
        Metric(
            "environment/replayed_turns", "turns",
            "Number of turns that were replayed in a new environment after the process of the old one ended.", "0",
            "A worker was killed or crashed; check `rollout_process.log`.",
        ),
        Metric(
            "environment/restarted_completions", "completions",
            "Number of completions that were restarted because their environment made different observations when its "
            "turns were replayed.", "0",
            "Make the environment deterministic, or find out why its process ends.",
        ),
        Metric(
            "environment/rewritten_contexts", "turns",
            "Number of turns that start a training row of their own because the chat template had changed earlier turns "
            "(`rollout.earlier_turns`).",
            "0, or every turn except the first if the template leaves out the thinking of earlier turns",
            "If it is not 0 although the template leaves nothing out, the model writes text, such as spaces, that the "
            "template renders differently.",
        ),
    ),
)  # fmt: skip

ROLLOUTS = (REWARDS, LENGTHS, COUNTS, GENERATION, SERVERS, ENVIRONMENTS)
