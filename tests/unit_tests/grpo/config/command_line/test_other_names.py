# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Names of other projects are answered with what the setting is called here."""

import re
import typing
from pathlib import Path

import pytest

from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.keys import (
    all_keys,
    answer_to_value,
    other_names,
    settings,
)
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.losses.policy_terms import BUILTIN

KEYS = settings(JobConfig)
TABLES = set(all_keys(JobConfig)) - set(KEYS)
NAMES, OTHER_TABLES, VALUES = (other_names()[part] for part in ("names", "tables", "values"))
ANSWERS = {**NAMES, **OTHER_TABLES}


def test_every_answer_names_settings_that_there_are():
    for name, answer in ANSWERS.items():
        for key in re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", answer):
            is_setting = key in KEYS or Path(key).suffix in (
                ".jsonl",
                ".md",
                ".py",
                ".sh",
                ".slurm",
            )
            assert is_setting, f"{name}: {key}"
        for table in re.findall(r"\[([a-z_]+)\]", answer):
            assert table in TABLES, f"{name}: {table}"


def values_of(key: str) -> set[str]:
    if key == "grpo.policy_loss":
        return set(BUILTIN)
    table, name = key.split(".")
    hint = typing.get_type_hints(typing.get_type_hints(JobConfig)[table])[name]
    return {word for part in (hint, *typing.get_args(hint)) for word in typing.get_args(part)}


# Words between quotation marks that are no values of a setting that the answer names before them.
NO_VALUES = {"organization/name@revision", "gloo"}


def test_every_answer_names_values_that_there_are():
    given = ANSWERS | {
        f"{k} = {v}": answer_to_value(k, v) for k, of_key in VALUES.items() for v in of_key
    }
    num_words = 0
    for name, answer in given.items():
        keys = re.findall(r"\b([a-z_]+\.[a-z_0-9]+)\b", f"{name} {answer}")
        known = {word for key in keys if key in KEYS for word in values_of(key)} | NO_VALUES
        for word in re.findall(r'"([^"]+)"', answer):
            assert word in known, f"{name}: {word}"
            num_words += 1
    assert num_words > 40
    for key, of_key in VALUES.items():
        assert key in KEYS
        assert not set(of_key) & values_of(key), "what is a value needs no answer"


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--grpo.policy_loss=dr_grpo", 'grpo.advantage = "group_mean"'),
        ("--grpo.policy_loss=vanilla", 'It is called "clip" here.'),
        ("--grpo.advantage=maxrl", 'It is called "max_rl" here.'),
        ("--grpo.advantage=vapo", 'It is called "gae" here.'),
        ("--grpo.aggregation=seq-mean-token-sum-norm", 'It is called "constant_length" here.'),
    ],
)
def test_a_value_of_another_project_is_answered(option, answer):
    needed = ["--model.hf_assets_path=m", "--prompts.path=p", "--inference.launch"]
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load_config([*needed, "--reward.functions=exact_match", option])


def test_no_name_hides_a_setting_of_ours():
    # A name that a setting of ours has as well is answered by that setting, unless both may be meant.
    names = {key.rpartition(".")[2] for key in KEYS}
    both = {
        *("delta", "max_concurrent", "model_path", "num_workers", "tensor_parallel_size"),
    }
    assert set(NAMES) & names == both
    assert not set(NAMES) & set(KEYS)
    assert not (set(NAMES) | set(OTHER_TABLES)) & set(TABLES)


OTHER = """
[grpo] beta = 0.1 | grpo.beta | grpo.kl_coef
[optimizer] learning_rate = 1e-6 | optimizer.learning_rate | optimizer.lr
[grpo] epsilon = 0.2 | grpo.epsilon | grpo.clip_low and grpo.clip_high
[grpo] scale_rewards = false | grpo.scale_rewards | group_mean
[model] lora_rank = 8 | model.lora_rank | lora.rank
[peft_config] r = 8 | peft_config | [lora]
[grpo] loss_type = 'sapo' | grpo.loss_type | has sapo
[algorithm] adv_estimator = 'maxrl' | algorithm.adv_estimator | "max_rl"
[vllm] gpu_memory_utilization = 0.5 | vllm | [inference]
[actor_rollout_ref.rollout] n = 8 | actor_rollout_ref.rollout.n | grpo.group_size
[actor_rollout_ref.actor] strategy = 'x' | actor_rollout_ref | [grpo], [optimizer]
[trainer] project_name = 'x' | trainer.project_name | WANDB_PROJECT
[grpo] temperature = 1 | grpo.temperature | There is rollout.temperature
[grpo] temprature = 1 | grpo.temprature | The nearest key is rollout.temperature
[grpo] num_server = 1 | grpo.num_server | The nearest key is inference.num_servers.
[grpo] compile = true | grpo.compile | compile.enable
[grpo] gamma = 1.0 | grpo.gamma | There is critic.gamma: is it in the wrong table?
[grpo] group_sise = 8 | grpo.group_sise | Did you mean grpo.group_size?
learning_rate = 1e-6 | learning_rate | optimizer.lr
"""


@pytest.mark.parametrize("row", OTHER.strip().splitlines())
def test_a_name_of_another_project_is_answered(row, tmp_path):
    text, key, answer = row.split(" | ")
    file = tmp_path / "x.toml"
    file.write_text(text.replace("] ", "]\n"))
    with pytest.raises(ConfigError) as error:
        read_config([f"--job.config_file={file}"])
    assert str(error.value).startswith(f"Unknown key {key} in the TOML file.")
    assert answer in str(error.value)


@pytest.mark.parametrize("option", ["--beta=0.1", "--grpo.beta=0.1", "--actor.kl-loss-coef=0.1"])
def test_a_name_of_another_project_is_answered_on_the_command_line(option):
    with pytest.raises(ConfigError, match=r"Unknown argument --.* It is called grpo\.kl_coef here"):
        read_config([option])


# What users of other systems have in their scripts, by system; an answer must lead to the key behind it.
SYSTEMS = """
ColossalAI: num_producers inference.num_servers, num_proc_per_producer inference.tensor_parallel_size, num_consumer_procs --gpus,
  num_episodes training.steps, inference_batch_size rollout.max_concurrent_rollouts, inference_microbatch_size rollout.max_concurrent_rollouts,
  train_batch_size grpo.prompts_per_step, train_minibatch_size grpo.num_minibatches, train_dataset_config prompts.path,
  inference_model_config model.hf_assets_path, generate_config [rollout], train_model_config model.hf_assets_path, grpo_config [grpo],
  plugin_config [parallelism], tokenizer_config model.hf_assets_path, inference_backend inference.kind, master_addr --rdzv-endpoint,
  master_port --rdzv-endpoint, core_algo grpo.advantage, save_dir job.dump_folder, eval_dataset_config evaluation.path,
  eval_save_dir evaluations.jsonl, eval_generation_config evaluation.temperature, log_rollout_interval observe.samples_per_step,
  rollout_save_dir samples.jsonl, enable_profiling profiling.enable_profiling, data_actor_buffer_size_limit rollout.buffer_size_limit,
  reward_fn_type reward.functions, tp_size parallelism.tensor_parallel_degree, pp_size parallelism.pipeline_parallel_degree, zero_stage ZeRO-3,
  lr optimizer.lr, train_microbatch_size training.local_batch_size, sp_size parallelism.context_parallel_degree
AReaL: num_workers reward.num_workers, drop_last Remove, consumer_batch_size grpo.prompts_per_step, enable_chunked_prefill inference.max_batched_tokens,
  enable_prefix_caching inference.extra_args, gpu_memory_utilization inference.gpu_memory_utilization, enable_sleep_mode inference.lend,
  max_num_seqs rollout.max_concurrent_rollouts, worker_extension_cls inference.urls, balance_batch prompts.balance_batch, c_clip dual_clip,
  behav_imp_weight_cap grpo.importance_cap, overlong_tokens grpo.overlong_buffer, weight_update_mode weight_sync.transport, discount critic.gamma
open-instruct: num_learners_per_node --nproc, deepspeed_stage ZeRO-3, deepspeed_zpg parallelism.data_parallel_replicate_degree,
  clip_higher grpo.clip_high, local_eval_every evaluation.interval, async_steps rollout.max_head_offpolicyness,
  num_unique_prompts_rollout grpo.prompts_per_step, single_gpu_mode inference.lend, dataset_mixer_list prompts.paths
torchtitan's fork: sglang_urls inference.urls, sglang_tp inference.tensor_parallel_size, sglang_ep inference.extra_args,
  sglang_pp parallelism.pipeline_parallel_degree, sglang_slurm_num_nodes inference.registry, sglang_port inference.urls, logit_loss_weight Remove,
  entropy_loss_weight grpo.entropy_coef, kl_estimator_type grpo.kl_estimator, clip_ratio_lower_bound grpo.clip_low,
  clip_ratio_upper_bound grpo.clip_high, policy_ratio_type grpo.policy_loss, pos_scaler Multiply,
  neg_scaler Multiply, grpo_by_token grpo.aggregation, scale_adv_by_len sequence_mean,
  num_microbatches training.local_batch_size, onpolicy_logp_threshold grpo.mismatch_max_k3, rollout_is_level grpo.mismatch_level,
  rollout_is_mode grpo.mismatch_correction, rollout_is_threshold grpo.importance_cap, ptx_mixin_batchsize grpo.ptx_per_step,
  ptx_scale_by_tokens grpo.ptx_coef, initial_load_path checkpoint.initial_load_path, flavor model.hf_assets_path,
  global_batch_size grpo.prompts_per_step, reset_state_every_n_steps Remove
verl, slime, OpenRLHF, NeMo-RL: free_cache_engine inference.lend, colocate_all_models inference.lend, partial_rollout rollout.overdue,
  ring_attn_size parallelism.context_parallel_degree, remote_rm_url 'judge', val_before_train evaluation.path, ratio_clip_max grpo.clip_high,
  calculate_per_token_loss grpo.aggregation, max_ckpt_num checkpoint.keep_latest_k, use_liger_loss grpo.logprob_chunk_tokens
several systems: num_learners --nproc, num_gpus --gpus, num_gpus_per_node --nproc, devices --gpus, zero_level ZeRO-3, zero_optimization ZeRO-3,
  hybrid_shard parallelism.data_parallel_replicate_degree, sharding_strategy parallelism.data_parallel_shard_degree, hsdp HSDP,
  dp parallelism.data_parallel_shard_degree, ep parallelism.expert_parallel_degree, cp parallelism.context_parallel_degree,
  pp parallelism.pipeline_parallel_degree, vllm_tp inference.tensor_parallel_size, sglang_tp_size inference.tensor_parallel_size,
  sglang_dp inference.num_servers, torch_compile compile.enable, flash_attn grpo.packed_attention, resume_from checkpoint.enable,
  wandb_entity WANDB_TEAM, sync_interval rollout.max_head_offpolicyness, staleness rollout.max_head_offpolicyness,
  async_level rollout.max_head_offpolicyness, warmup lr_scheduler.warmup_steps, min_lr lr_scheduler.min_lr_factor,
  lr_decay_steps lr_scheduler.decay_ratio, enable_thinking prompts.chat_template_kwargs, chat_template prompts.chat_template_kwargs,
  tools rollout.environment, tool_call_parser form, lambda critic.gae_lambda, value_lr critic.lr, kl_loss_weight grpo.kl_coef,
  adamw_eps optimizer.eps, reward_coef reward.weights, rm_path 'judge', reward_model_path 'judge', ref_path grpo.ref_model_path
"""


@pytest.mark.parametrize("prefix", ["--grpo.", "--"])
def test_names_of_every_known_system_lead_to_what_there_is(prefix):
    for pair in re.sub(r"^.+:", "", SYSTEMS, flags=re.MULTILINE).replace("\n", ",").split(","):
        if pair.strip():
            name, lead = pair.split()
            with pytest.raises(ConfigError) as error:
                read_config([f"{prefix}{name.replace('_', '-')}=1"])
            assert lead in str(error.value), name


@pytest.mark.parametrize(
    "name",
    [
        *("pos_shift", "frobnicate", "xyz", "warp_factor", "kv_dropout_mode", "loss_weight"),
        *("num_horses", "prompt_path", "top_n", "sglang_cp", "dropout_coef", "path_of_data"),
    ],
)
def test_a_name_that_is_like_no_other_gets_no_wrong_lead(name):
    with pytest.raises(ConfigError, match=r"No key has a similar name.*docs/other-names\.md"):
        read_config([f"--grpo.{name}=1"])
