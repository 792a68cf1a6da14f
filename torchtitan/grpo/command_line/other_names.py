# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""What other projects call a setting or a value, and what is answered to whoever writes it here.

The names are those of TRL, verl, prime-rl, slime, AReaL, OpenRLHF and the Transformers trainer. The
last part of a key decides, unless its whole name or its table has an answer of its own.
"""

_LORA = "Adapters are set by the table [lora]."
_BATCH = (
    "A step trains on grpo.prompts_per_step prompts x grpo.group_size rollouts, and "
    "training.local_batch_size is the number of packed rows in a microbatch. Gradients are "
    "accumulated over as many microbatches as the step needs."
)
_MICROBATCH = (
    "training.local_batch_size is the number of packed rows of training.seq_len tokens in a "
    "microbatch; it changes memory and speed, but not the gradient."
)
_LENGTH = "The run's length is training.steps, in batches, and not in epochs over the prompts."
_CLIP = "It is called grpo.clip_low and grpo.clip_high here, one for each side."
_WHERE_SERVERS = (
    "Servers always are processes of their own: inference.launch = true starts them, and "
    "inference.urls names running ones. inference.kind is vllm, sglang or embedded."
)
_SERVER_OPTION = "Options of launched servers go to inference.extra_args, as on their command line."
_TENSOR_PARALLEL = (
    "Servers: inference.tensor_parallel_size. Trainer: parallelism.tensor_parallel_degree."
)
_SCALE = (
    'grpo.advantage decides: "group_norm" divides by the standard deviation of the group, '
    '"group_mean" divides by nothing (Dr.GRPO), "batch_norm" divides by that of the batch.'
)
_ADVANTAGE = (
    'It is called grpo.advantage here: "group_norm" is GRPO, "group_mean" Dr.GRPO, "leave_one_out" RLOO, '
    '"batch_norm" REINFORCE++-baseline, "max_rl" MaxRL.'
)
_LOSS = (
    'grpo.policy_loss is the loss of a token ("clip" is PPO\'s, also "gspo", "cispo", "sapo", "gmpo", '
    '"reinforce"), and grpo.aggregation how tokens become one number ("token_mean" as in DAPO, '
    '"sequence_mean" as in GRPO, "constant_length" as in Dr.GRPO).'
)
_DR_GRPO = (
    'Dr.GRPO is grpo.advantage = "group_mean" with grpo.aggregation = "constant_length" and '
    'grpo.policy_loss = "clip".'
)
_DAPO = (
    'DAPO is grpo.policy_loss = "clip" with grpo.clip_high = 0.28, grpo.aggregation = "token_mean" and '
    "rollout.dynamic_sampling."
)
_PRECISION = "training.mixed_precision_param is the type of the forward pass, and training.dtype that of the weights."
_WANDB = "metrics.enable_wandb = true turns it on; WANDB_PROJECT and WANDB_RUN_NAME name project and run."
_SAVE = (
    "Checkpoints are set in [checkpoint] (enable, interval), exports by grpo.hf_export_interval."
)
_STALENESS = "It is called rollout.max_head_offpolicyness here, in batches."
_OFFLOAD = (
    "Offloading to the CPU is not supported; grpo.ref_model_offload does it for the reference."
)
_CRITIC = "There is no critic: advantages come from the rewards of a group. Remove it."
_CHAT = "A prompt that is a list of chat messages is put through the tokenizer's chat template."

# A value that is a key alone stands for "It is called KEY here."
OTHER_NAMES: dict[str, str] = {
    # The algorithm.
    "beta": "grpo.kl_coef",
    "kl_loss_coef": "grpo.kl_coef",
    "kl_ctl": "grpo.kl_coef",
    "kl_coefficient": "grpo.kl_coef",
    "init_kl_coef": "grpo.kl_coef",
    "kl_beta": "grpo.kl_coef",
    "kl_tau": "grpo.kl_coef",
    "use_kl_loss": 'A KL penalty is applied if grpo.kl_coef is above 0; grpo.kl_in = "loss" is the default.',
    "use_kl_in_reward": 'Set grpo.kl_in = "reward", with grpo.kl_coef above 0.',
    "kl_loss_type": "grpo.kl_estimator",
    "kl_type": "grpo.kl_estimator",
    "ref_load": "grpo.ref_model_path",
    "ref_model": "grpo.ref_model_path",
    "sync_ref_model": "grpo.ref_model_ema moves the reference towards the policy after each step.",
    "ref_model_mixup_alpha": "grpo.ref_model_ema is 1 minus it, and applies after each step.",
    "ref_model_sync_steps": "grpo.ref_model_ema moves the reference towards the policy after each step.",
    "num_generations": "grpo.group_size",
    "rollouts_per_example": "grpo.group_size",
    "n_samples": "grpo.group_size",
    "n_samples_per_prompt": "grpo.group_size",
    "num_samples_per_prompt": "grpo.group_size",
    "rollout_n": "grpo.group_size",
    "num_rollouts": "grpo.group_size",
    "samples_per_prompt": "grpo.group_size",
    "actor_rollout_ref.rollout.n": "grpo.group_size",
    "rollout.n": "grpo.group_size",
    "n": "grpo.group_size",
    "train_batch_size": _BATCH,
    "batch_size": _BATCH,
    "rollout_batch_size": "It is called grpo.prompts_per_step here, in prompts.",
    "generation_batch_size": "It is called grpo.prompts_per_step here, in prompts.",
    "num_prompts_per_step": "grpo.prompts_per_step",
    "prompts_per_rollout": "grpo.prompts_per_step",
    "per_device_train_batch_size": _BATCH,
    "per_device_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "grad_accumulation_steps": _BATCH,
    "steps_per_generation": "grpo.num_minibatches",
    "num_steps_per_rollout": "grpo.num_minibatches",
    "ppo_n_minibatches": "grpo.num_minibatches",
    "ppo_mini_batch_size": (
        "It is given as a number of parts: grpo.num_minibatches = train batch / mini batch."
    ),
    "mini_batch_size": "It is given as a number of parts, grpo.num_minibatches.",
    "micro_batch_size": _MICROBATCH,
    "micro_train_batch_size": _MICROBATCH,
    "ppo_micro_batch_size": _MICROBATCH,
    "ppo_micro_batch_size_per_gpu": _MICROBATCH,
    "ppo_max_token_len_per_gpu": _MICROBATCH,
    "max_tokens_per_gpu": _MICROBATCH,
    "use_dynamic_bsz": "Rollouts are always packed into rows of training.seq_len tokens. Remove it.",
    "use_dynamic_batch_size": "Rollouts are always packed into rows of training.seq_len tokens. Remove it.",
    "num_iterations": "grpo.num_epochs",
    "mu": "grpo.num_epochs",
    "ppo_epochs": "grpo.num_epochs",
    "update_epochs": "grpo.num_epochs",
    "epsilon": _CLIP,
    "eps_clip": _CLIP,
    "cliprange": _CLIP,
    "clip_range": _CLIP,
    "clip_eps": _CLIP,
    "clip_epsilon": _CLIP,
    "clip_ratio": _CLIP,
    "clip_ratio_low": "grpo.clip_low",
    "epsilon_low": "grpo.clip_low",
    "eps_clip_low": "grpo.clip_low",
    "clip_ratio_high": "grpo.clip_high",
    "epsilon_high": "grpo.clip_high",
    "eps_clip_high": "grpo.clip_high",
    "eps_clip_higher": "grpo.clip_high",
    "clip_ratio_c": "grpo.dual_clip",
    "eps_clip_c": "grpo.dual_clip",
    "delta": "grpo.dual_clip bounds the loss of tokens with negative advantages.",
    "loss_type": _LOSS,
    "policy_loss_fn": _LOSS,
    "loss_mode": _LOSS,
    "tau_pos": "grpo.sapo_temperature",
    "tau_neg": "grpo.sapo_temperature_negative",
    "sapo_temperature_neg": "grpo.sapo_temperature_negative",
    "loss_agg_mode": "grpo.aggregation",
    "importance_sampling_level": 'grpo.policy_loss = "gspo" has one ratio for each sequence; "clip" has one for each token.',
    "scale_rewards": _SCALE,
    "norm_adv_by_std_in_grpo": _SCALE,
    "group_reward_norm": _SCALE,
    "adv_estimator": _ADVANTAGE,
    "advantage_estimator": _ADVANTAGE,
    "entropy_coeff": "grpo.entropy_coef",
    "entropy_coefficient": "grpo.entropy_coef",
    "ent_coef": "grpo.entropy_coef",
    "vllm_importance_sampling_correction": 'grpo.mismatch_correction = "truncate" is the default.',
    "vllm_importance_sampling_cap": "grpo.importance_cap",
    "tis_imp_ratio_cap": "grpo.importance_cap",
    "tis_clip": "grpo.importance_cap",
    "rollout_is_batch_normalize": "grpo.mismatch_normalize",
    "use_opsm": "grpo.off_policy_mask_threshold",
    "opsm_delta": "grpo.off_policy_mask_threshold",
    "rollout_rs": "The bounds are grpo.mismatch_max_k1, mismatch_max_k3, mismatch_max_tv and mismatch_max_ratio.",
    "use_bias_correction_kl": "grpo.kl_importance",
    "use_unbiased_kl": "grpo.kl_importance",
    "use_tis": 'grpo.mismatch_correction = "truncate" is the default.',
    "use_decoupled_loss": 'grpo.old_policy = "step_start" (decoupled PPO) is the default.',
    "mask_truncated_completions": "rollout.drop_truncated",
    "overlong_filtering": "rollout.drop_truncated",
    "overlong_buffer_len": "grpo.overlong_buffer",
    "overlong_reward_penalty": "grpo.overlong_penalty",
    "filter_groups": "rollout.dynamic_sampling",
    "dynamic_filtering": "rollout.dynamic_sampling",
    "online_difficulty_filtering": "rollout.dynamic_sampling",
    "dynamic_sampling_filter_path": "rollout.dynamic_sampling leaves out groups with equal rewards; rollout.should_accept names a function of your own.",
    "gamma": _CRITIC,
    "lam": _CRITIC,
    "gae_lambda": _CRITIC,
    "vf_coef": _CRITIC,
    "critic": _CRITIC,
    "value_model": _CRITIC,
    # Generation.
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_tokens": "rollout.max_new_tokens",
    "max_output_tokens": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "max_prompt_length": "prompts.max_prompt_tokens",
    "prompt_max_len": "prompts.max_prompt_tokens",
    "rollout_max_prompt_len": "prompts.max_prompt_tokens",
    "max_seq_length": "training.seq_len",
    "max_seq_len": "training.seq_len",
    "max_length": "training.seq_len",
    "cutoff_len": "training.seq_len",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "min_p": "Sampling has rollout.temperature, rollout.top_p and rollout.top_k only. Remove it.",
    "repetition_penalty": "Sampling has rollout.temperature, rollout.top_p and rollout.top_k only. Remove it.",
    "frequency_penalty": "Sampling has rollout.temperature, rollout.top_p and rollout.top_k only. Remove it.",
    "stop": "Completions end at the model's end tokens and at rollout.stop_token_ids.",
    "stop_strings": "Completions end at the model's end tokens and at rollout.stop_token_ids.",
    "max_async_level": _STALENESS,
    "max_off_policy_steps": _STALENESS,
    "max_staleness": _STALENESS,
    "staleness_threshold": _STALENESS,
    "async_generation_ratio": _STALENESS,
    "max_concurrent": "rollout.max_concurrent_rollouts",
    "max_inflight_rollouts": "rollout.max_concurrent_rollouts",
    "sglang_server_concurrency": "rollout.max_concurrent_rollouts",
    "use_vllm": _WHERE_SERVERS,
    "vllm_mode": _WHERE_SERVERS,
    "vllm_server_base_url": "inference.urls",
    "vllm_server_host": "inference.urls",
    "vllm_server_port": "inference.urls",
    "base_url": "inference.urls",
    "server_url": "inference.urls",
    "weight_sync.backend": (
        'It is part of weight_sync.transport now: "nccl" stands for backend = "nccl", "host" for '
        'backend = "gloo", and "auto", the default, chooses for each server.'
    ),
    "engine": "inference.kind",
    "rollout_backend": "inference.kind",
    "backend_name": "inference.kind",
    "vllm_gpu_memory_utilization": "inference.gpu_memory_utilization",
    "mem_fraction_static": "inference.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "inference.tensor_parallel_size",
    "tensor_model_parallel_size": _TENSOR_PARALLEL,
    "max_num_batched_tokens": "inference.max_batched_tokens",
    "vllm_max_model_length": "inference.max_model_len",
    "enforce_eager": _SERVER_OPTION,
    "num_engines": "inference.num_servers",
    "vllm_num_engines": "inference.num_servers",
    # Prompts and rewards.
    "train_files": "prompts.path",
    "train_file": "prompts.path",
    "prompt_data": "prompts.path",
    "dataset_name": "prompts.path",
    "dataset_config": "prompts.name",
    "train_split": "prompts.split",
    "dataset_train_split": "prompts.split",
    "prompt_key": "prompts.column",
    "input_key": "prompts.column",
    "prompt_column": "prompts.column",
    "label_key": "Reward functions get each further column of the data by its name; prompts.rename renames columns.",
    "answer_key": "Reward functions get each further column of the data by its name; prompts.rename renames columns.",
    "apply_chat_template": _CHAT,
    "val_files": "evaluation.path",
    "eval_prompt_data": "evaluation.path",
    "test_freq": "evaluation.interval",
    "eval_steps": "evaluation.interval",
    "eval_interval": "evaluation.interval",
    "n_samples_per_eval_prompt": "evaluation.num_samples",
    "eval_n_samples_per_prompt": "evaluation.num_samples",
    "evaluation.n": "evaluation.num_samples",
    "evaluation.k": "evaluation.pass_at",
    "evaluation.greedy": "evaluation.temperature = 0, the default, is greedy decoding.",
    "evaluation.max_tokens": "evaluation.max_new_tokens",
    "eval_temperature": "evaluation.temperature",
    "eval_top_p": "evaluation.top_p",
    "eval_max_response_len": "evaluation.max_new_tokens",
    "eval_datasets": "Several sets of held-out prompts are tables [evaluation.sets.NAME], each with a path.",
    "reward_funcs": "reward.functions",
    "reward_functions": "reward.functions",
    "reward_function": "reward.functions",
    "reward_fn": "reward.functions",
    "custom_reward_function": "reward.functions",
    "custom_rm_path": "reward.functions",
    "rm_type": "reward.functions",
    "reward_weights": "reward.weights",
    "reward_model": "A reward model is called by a function of your own; name it in reward.functions.",
    "reward_processing_classes": "A reward model is called by a function of your own; name it in reward.functions.",
    "env_id": "rollout.environment",
    # The trainer.
    "learning_rate": "optimizer.lr",
    "actor_learning_rate": "optimizer.lr",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "training.max_norm",
    "grad_clip": "training.max_norm",
    "clip_grad": "training.max_norm",
    "gradient_clipping": "training.max_norm",
    "lr_warmup_steps": "lr_scheduler.warmup_steps",
    "warmup_ratio": "It is given in steps, lr_scheduler.warmup_steps.",
    "lr_warmup_steps_ratio": "It is given in steps, lr_scheduler.warmup_steps.",
    "lr_scheduler_type": "lr_scheduler.decay_type is the shape of the decay, and lr_scheduler.decay_ratio its share of the run.",
    "num_train_epochs": _LENGTH,
    "total_epochs": _LENGTH,
    "num_epoch": _LENGTH,
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "num_rollout": "training.steps",
    "total_training_steps": "training.steps",
    "max_train_steps": "training.steps",
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "torch_dtype": _PRECISION,
    "gradient_checkpointing": 'activation_checkpoint.mode = "full" recomputes activations.',
    "enable_gradient_checkpointing": 'activation_checkpoint.mode = "full" recomputes activations.',
    "attn_implementation": "grpo.packed_attention",
    "model_name": "model.hf_assets_path",
    "model_name_or_path": "model.hf_assets_path",
    "model_path": "model.hf_assets_path",
    "hf_checkpoint": "model.hf_assets_path",
    "pretrain": "model.hf_assets_path",
    "tokenizer": "The tokenizer is that of model.hf_assets_path.",
    "tokenizer_name": "The tokenizer is that of model.hf_assets_path.",
    "model_revision": 'Write it behind the name: model.hf_assets_path = "organization/name@revision".',
    "revision": 'Write it behind the name: model.hf_assets_path = "organization/name@revision".',
    "param_offload": _OFFLOAD,
    "optimizer_offload": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "enable_activation_offload": "grpo.pipeline_offload moves activations of pipeline stages to the host.",
    "activation_offloading": "grpo.pipeline_offload moves activations of pipeline stages to the host.",
    "ulysses_sequence_parallel_size": "parallelism.context_parallel_degree",
    "context_parallel_size": "parallelism.context_parallel_degree",
    "sequence_parallel_size": "parallelism.context_parallel_degree",
    "tensor_parallel_size": _TENSOR_PARALLEL,
    "pipeline_model_parallel_size": "parallelism.pipeline_parallel_degree",
    "fsdp_size": "parallelism.data_parallel_shard_degree",
    "n_gpus_per_node": "The number of ranks is that of torchrun: torchtitan-grpo train X.toml --gpus N.",
    "actor_num_gpus_per_node": "The number of ranks is that of torchrun: torchtitan-grpo train X.toml --gpus N.",
    "nnodes": "Start the run on each host, as the README shows under several machines.",
    # Output.
    "output_dir": "job.dump_folder",
    "default_local_dir": "job.dump_folder",
    "save_path": "job.dump_folder",
    "logging_dir": "job.dump_folder",
    "logging_steps": "metrics.log_freq",
    "wandb_project": _WANDB,
    "project_name": _WANDB,
    "experiment_name": _WANDB,
    "run_name": _WANDB,
    "use_wandb": _WANDB,
    "report_to": "metrics.enable_wandb and metrics.enable_tensorboard choose where metrics go.",
    "logger": "metrics.enable_wandb and metrics.enable_tensorboard choose where metrics go.",
    "log_completions": "observe.samples_per_step rollouts are written to samples.jsonl in each step.",
    "save_steps": _SAVE,
    "save_freq": _SAVE,
    "save_interval": _SAVE,
    "save_strategy": _SAVE,
    "save_total_limit": "checkpoint.keep_latest_k",
    "resume_from_checkpoint": "A run resumes from its own job.dump_folder if checkpoint.enable is set.",
    "resume_mode": "A run resumes from its own job.dump_folder if checkpoint.enable is set.",
    "random_seed": "debug.seed",
    # Not there.
    "peft": _LORA,
    "peft_config": _LORA,
    "use_peft": _LORA,
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "Adapters have no dropout. Remove it.",
    "lora_target_modules": "lora.target_modules",
    "load_in_4bit": "Quantized training is not supported: weights are float32 or bfloat16. Remove it.",
    "load_in_8bit": "Quantized training is not supported: weights are float32 or bfloat16. Remove it.",
    "deepspeed": "Sharding is torchtitan's FSDP2; [parallelism] sets its layout. Remove it.",
    "fsdp": "Sharding is torchtitan's FSDP2; [parallelism] sets its layout. Remove it.",
    "accelerate": "Sharding is torchtitan's FSDP2; [parallelism] sets its layout. Remove it.",
}

# Tables of other projects. A key in them that has an answer above is answered by it.
OTHER_TABLES: dict[str, str] = {
    "actor_rollout_ref": "verl's actor is [grpo], [optimizer] and [training] here, and its rollout [rollout] and [inference].",
    "actor": "The actor's settings are [grpo], [optimizer] and [training] here.",
    "ref": "The reference is grpo.ref_model_path, with grpo.kl_coef above 0.",
    "trainer": "The trainer's settings are [training], [optimizer], [checkpoint] and [job] here.",
    "orchestrator": "The orchestrator's settings are [grpo], [prompts] and [rollout] here.",
    "data": "Prompts are set in [prompts], and held-out ones in [evaluation].",
    "dataset": "Prompts are set in [prompts], and held-out ones in [evaluation].",
    "train_dataset": "Prompts are set in [prompts], and held-out ones in [evaluation].",
    "algorithm": "The algorithm's settings are in [grpo].",
    "algo": "The algorithm's settings are in [grpo].",
    "gconfig": "Sampling is set in [rollout].",
    "sampling": "Sampling is set in [rollout].",
    "sampling_params": "Sampling is set in [rollout].",
    "generation": "Sampling is set in [rollout].",
    "env": "An environment is named in rollout.environment.",
    "environment": "An environment is named in rollout.environment.",
    "optim": "It is called [optimizer] here.",
    "scheduler": "It is called [lr_scheduler] here.",
    "ckpt": "It is called [checkpoint] here.",
    "vllm": "Servers are set in [inference].",
    "sglang": "Servers are set in [inference].",
    "server": "Servers are set in [inference].",
}

# Values that a setting of ours had once, or that other projects call so, by key and value. A value that
# is one word stands for "It is called "WORD" here."
OTHER_VALUES: dict[str, dict[str, str]] = {
    "weight_sync.transport": {"group": 'Groups are "auto" (the default), "nccl" or "host" now.'},
    "grpo.policy_loss": {
        "ppo": "clip",
        "vanilla": "clip",
        "grpo": "clip",
        "bnpo": 'It is grpo.policy_loss = "clip" with grpo.aggregation = "token_mean".',
        "dr_grpo": _DR_GRPO,
        "dapo": _DAPO,
        "geo_mean": "gmpo",
        "maxrl": 'MaxRL is grpo.advantage = "max_rl".',
        "rloo": 'RLOO is grpo.advantage = "leave_one_out".',
    },
    "grpo.advantage": {
        "grpo": "group_norm",
        "dr_grpo": "group_mean",
        "maxrl": "max_rl",
        "rloo": "leave_one_out",
        "reinforce_plus_plus_baseline": "batch_norm",
        "gae": _CRITIC,
    },
    "grpo.aggregation": {
        "seq_mean_token_mean": "sequence_mean",
        "seq_mean_token_sum_norm": "constant_length",
        "grpo": "sequence_mean",
        "dapo": "token_mean",
        "dr_grpo": "constant_length",
    },
    "grpo.kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
}


def answer_to_value(key: str, value: object) -> str:
    """Returns what is answered to a value that a setting does not take; mostly empty."""
    word = str(value).lower().replace("-", "_")
    answer = OTHER_VALUES.get(key, {}).get(word, "")
    return f'It is called "{answer}" here.' if answer and " " not in answer else answer


def answer_to(key: str) -> str:
    """Returns what is answered to a name of another project; empty if the name has no answer.

    Args:
        key: A key that there is not, with or without its table.
    """
    key = key.replace("-", "_")
    parts = key.split(".")
    whole = [".".join(parts[i:]) for i in range(len(parts))]
    for name in whole:
        if name in OTHER_NAMES:
            return _sentence(OTHER_NAMES[name])
    return OTHER_TABLES.get(key, "")


def _sentence(answer: str) -> str:
    is_key = " " not in answer
    return f"It is called {answer} here." if is_key else answer
