# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Checks that a model, its tokenizer, end-of-sequence tokens and chat template fit together.

A model directory with files from two models loads without an error, but then causes silent faults:
completions that never end, or tokens that the model does not have.
"""

from collections.abc import Iterator

from torchtitan.grpo.config import RolloutProcessConfig
from torchtitan.grpo.rollout.chat_template import LeftOut
from torchtitan.grpo.rollout.tokenizer import TextCodec


def model_warnings(
    codec: TextCodec, config: RolloutProcessConfig, *, is_chat: bool
) -> Iterator[str]:
    """Yields warnings on files that do not fit. Raises ``ValueError`` if chat prompts cannot be rendered."""
    yield from _vocabulary_warnings(codec, config)
    yield from prompt_notes(codec, is_chat=is_chat)
    if is_chat and config.rollout.environment is not None:
        yield from _reply_warnings(codec)
    if config.rollout.ignore_eos or not config.eos_token_ids:
        return
    path = config.hf_assets_path
    for token in config.eos_token_ids:
        if codec.token_text(token) is None:
            yield (
                f"The end-of-sequence token {token} of {path} is not in its tokenizer.json. Check that "
                "generation_config.json, config.json and the tokenizer belong to the same model."
            )
    yield from _end_warnings(codec, config, is_chat)


def prompt_notes(codec: TextCodec, *, is_chat: bool) -> Iterator[str]:
    """Yields what may surprise the author of the prompts. At least one must have been tokenized before."""
    if not is_chat:
        if left_out := codec.left_out():
            yield (
                f"The tokenizer puts {', '.join(map(repr, left_out))} after each text (the "
                "post_processor of its tokenizer.json). Prompts are used without, because the model "
                "is to continue them."
            )
        return
    if end := codec.prompt_end:
        yield (
            f"A chat prompt ends with {end!r}, which ends a completion: the chat template does not open "
            "the assistant's turn (add_generation_prompt). Check that the model is trained to answer "
            "after it."
        )
    if date := codec.template.date:
        yield (
            f"The chat template prints today's date. All prompts of this run show {date}, the day of its "
            "first start, also tomorrow and after a resume."
        )


def _reply_warnings(codec: TextCodec) -> Iterator[str]:
    for role in ("user", "tool"):
        try:
            codec.reply_text([{"role": role, "content": "?"}], ())
        except LeftOut as error:
            yield f"A reply of rollout.environment in the role {role!r} would end the run. {error}"
        except ValueError:  # the template refuses the role by itself
            continue


def _vocabulary_warnings(codec: TextCodec, config: RolloutProcessConfig) -> Iterator[str]:
    if codec.largest_id >= config.vocab_size:
        yield (
            f"The tokenizer in {config.hf_assets_path} has tokens up to {codec.largest_id}, but the "
            f"model's vocab_size is {config.vocab_size}. A prompt with one of the further tokens ends "
            "the run. Check that the tokenizer and config.json belong to the same model."
        )


def _end_warnings(codec: TextCodec, config: RolloutProcessConfig, is_chat: bool) -> Iterator[str]:
    ends = {*config.eos_token_ids, *config.rollout.stop_token_ids}
    known = ", ".join(f"{token} {codec.token_text(token)!r}" for token in sorted(ends))
    candidates = {"the tokenizer's eos_token": codec.special_text("eos_token")}
    if is_chat:
        candidates["the token with which the chat template ends a turn"] = codec.end_of_turn()
    found: dict[int, str] = {}
    for what, text in candidates.items():
        token = codec.single_token(text) if text else None
        if token is not None and token not in ends:
            found.setdefault(token, f"{text!r} ({token}), {what}")
    for token, description in found.items():
        yield (
            f"A completion does not end at {description}: the model's end-of-sequence tokens are "
            f"{known}. If the model ends its answers with it, completions run on to "
            f"rollout.max_new_tokens. Set rollout.stop_token_ids = [{token}], or add it to "
            "eos_token_id in generation_config.json."
        )
