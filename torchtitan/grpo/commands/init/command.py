# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan-grpo init MODEL DATA``: writes a TOML file for them, and checks it as ``train`` would.

The modules beside this one, in reading order: `columns` (of prompts and answers), `reward_choice`,
`prompt_form` (what the model sees), `settings` (values from lengths and machine), `toml_file` (the text).
"""

import argparse
import json
import os
import shlex
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.grpo.commands.init.columns import Columns, Source, choose_columns, read_source
from torchtitan.grpo.commands.init.prompt_form import answer_tokens, choose_form, measure
from torchtitan.grpo.commands.init.reward_choice import RewardChoice, choose_reward
from torchtitan.grpo.commands.init.toml_file import whole_text
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.models.hub import locate_model
from torchtitan.grpo.rollout.tokenizer import TextCodec
from torchtitan.grpo.start.train import as_trained
from torchtitan.grpo.system.errors import RunError
from torchtitan.grpo.system.files import write_whole
from torchtitan.grpo.weight_wire.model_folder import read_json

if TYPE_CHECKING:
    from torchtitan.grpo.commands.init.settings import Findings, Sizes

_STAND_IN = "think_answer_tags"  # needs no column
_REFUSED = "would be refused: "


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan-grpo init",
        description="Writes a TOML file with which MODEL is trained on DATA, and says what it found.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face directory, or name on the Hub")
    add("data", metavar="DATA", help=".jsonl or .parquet file, or a Hugging Face data set")
    add("--output", type=Path, default=Path("grpo.toml"), help="the file to write (grpo.toml)")
    add("--force", action="store_true", help="write over an existing file")
    add("--prompt-column", metavar="NAME", help="column, or path within one, with the prompts")
    add("--answer-column", metavar="NAME", help="column, or path within one, with right answers")
    add("--name", help="configuration of a Hugging Face data set that has several")
    add("--split", default="train", help="split of a Hugging Face data set (train)")
    return parser


def init(arguments: list[str]) -> int:
    """Runs the command and returns its exit status; RunError if no file is written, or a run would fail."""
    given = options().parse_args(arguments)
    output: Path = given.output
    _refuse_output(output, force=given.force)
    folder, notes = locate_model(given.model, "MODEL", weights=False)
    read_json(Path(folder, "config.json"), "MODEL")
    try:
        has_template = TextCodec(folder, ()).has_chat_template()
    except ValueError as error:
        raise ConfigError(str(error).replace("model.hf_assets_path", "MODEL")) from error
    source = read_source(given.data, given.split, given.name)
    columns = choose_columns(
        source, given.prompt_column, given.answer_column, has_template=has_template
    )
    reward = choose_reward(columns, has_template=has_template)
    found = _find(given, folder, source, columns, reward)

    from torchtitan.grpo.commands.init.settings import choose_settings, choose_sizes

    sizes = choose_sizes(found)
    for line in (*notes, *_summary(found, sizes, source, columns)):
        print(line, flush=True)
    settings, values, fits = choose_settings(found, sizes)
    if not fits:
        print(
            f"warning: even with adapters and recomputation, a training step needs {values['memory']}, so "
            "that the run may end for want of memory",
            flush=True,
        )
    text = whole_text(settings, values | {"date": date.today(), "command": _train(output)})
    is_new = not reward.is_builtin and write_reward(output, source, columns)
    write_whole(output, text.encode())
    beside = f" and {output.with_name(REWARD_FILE)}" if is_new else ""
    print(f"wrote    {output}{beside}, not checked yet", flush=True)
    _check(output, is_new_reward=is_new)
    print(_next(output, reward, is_new))
    return 0


def _refuse_output(output: Path, *, force: bool) -> None:
    if output.exists() and not (force and output.is_file()):
        raise ConfigError(
            f"--output must name a file that does not exist yet, got {output}. Name another one"
            + (", or add --force to write over it." if output.is_file() else ".")
        )
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ConfigError(
            f"--output must be in a folder in which files can be written, got {output}. Make the folder "
            "first."
        )


def _find(
    given: argparse.Namespace, folder: str, source: Source, columns: Columns, reward: RewardChoice
) -> "Findings":
    """Measures model, data and machine. Torch is imported only here, because importing it takes seconds."""
    from torchtitan.grpo.commands.init.machine import count_parameters, find_machine
    from torchtitan.grpo.commands.init.settings import Findings, longest_sequence
    from torchtitan.grpo.models.hf_config import read_hf_model
    from torchtitan.grpo.observe.console import init_console

    init_console("error", is_rank_zero=True)
    model = read_hf_model(folder, setting="MODEL")
    form, codec = choose_form(folder, source, columns, reward)
    held_out, rest = source.held_out(columns) or (None, "")
    form.settings.split += rest
    return Findings(
        model_name=given.model,
        model=model,
        num_params=count_parameters(model),
        num_rows=source.num_rows - (held_out.num_rows if held_out and rest else 0),
        form=form,
        lengths=measure(codec, form.settings, longest_sequence(model) - 1),
        reward=reward,
        function=reward.function or f"{given.output.with_name(REWARD_FILE)}:reward",
        answer_tokens=answer_tokens(codec, columns, reward),
        held_out=held_out,
        machine=find_machine(),
        dump_folder=f"outputs/{given.output.stem}",
    )


def _summary(found: "Findings", sizes: "Sizes", source: Source, columns: Columns) -> Iterator[str]:
    reward = found.reward
    yield f"model    {found.model.architecture}, {found.num_params / 1e6:,.1f} M parameters, at {found.model.path}"
    yield f"data     {source.path}: {source.num_rows:,} rows, columns {', '.join(source.columns)}"
    kind = "chat messages, with the model's chat template" if columns.is_chat else "texts"
    keys = ("template", "chat_template_kwargs")
    shaped = " and ".join(f"prompts.{key}" for key in keys if getattr(found.form.settings, key))
    yield f"prompts  {columns.prompt}: {kind}{f', with {shaped}' if shaped else ''}"
    yield (
        f"lengths  of {len(found.lengths):,} prompts: {found.length(50)} tokens (median), "
        f"{found.length(99)} (99th percentile), {found.length(100)} (longest); {sizes.num_dropped} above "
        f"{sizes.prompt} are left out"
    )
    if reward.is_builtin:
        yield (
            f"reward   {reward.function}, which reads the column {columns.answer}: 1.0 for {reward.hits} of "
            f"the first {reward.num_rows} right answers"
        )
    else:
        yield f"reward   none of the built-in ones fits: {reward.reason}"
    yield f"machine  {found.machine.describe()}"
    held = found.held_out
    yield f"held out {held.describe() if held else 'no rows: there are too few to spare some'}"
    if found.machine.on_gpu and found.machine.kind == "embedded":
        yield (
            "warning: neither .venv-vllm nor .venv-sglang was found, so that the embedded server generates, "
            "many times as slowly. bash scripts/install_vllm.sh installs vLLM; then run init again, with --force."
        )


def _check(output: Path, *, is_new_reward: bool) -> None:
    """Opens all inputs as a run would, and prints warnings; ConfigError if the run would be refused."""
    words = [str(output)]
    if is_new_reward:  # it raises until it has been written
        words += ["--reward.functions", _STAND_IN, "--evaluation.function", _STAND_IN]
    try:
        with as_trained(words) as rest:
            from torchtitan.grpo.start.entry import findings

            _, found = findings(rest, {}, shows_settings=False)
            lines = [line.strip() for line in found]
        for line in lines:
            if line.startswith(_REFUSED):
                raise ConfigError(line.removeprefix(_REFUSED))
    except (RunError, ValueError) as error:
        raise ConfigError(
            f"{output} was written, but a run with it would be refused: {error}"
        ) from error
    for line in lines:
        if line.startswith("warning: "):
            print(line, flush=True)
    parts = "model and prompts" if is_new_reward else "model, prompts and reward"
    print(f"checked  the file with its {parts}, as a run does at its start", flush=True)


def _next(output: Path, reward: RewardChoice, is_new_reward: bool) -> str:
    file = output.with_name(REWARD_FILE)
    if is_new_reward:
        return (
            f"Next: write the function in {file}, without which no run starts. Then:\n"
            f"  torchtitan-grpo check-config {shlex.quote(str(output))}\n  {_train(output)}"
        )
    kept = "" if reward.is_builtin else f"{file} was there and is used. "
    return f"{kept}Next:\n  {_train(output)}"


def _train(output: Path) -> str:
    return f"torchtitan-grpo train {shlex.quote(str(output))}"


REWARD_FILE = "reward.py"

_TEXT = '''\
"""The reward of @TOML@, to be written: docs/how-to/rewards.md leads through it."""


def reward(prompts, completions, **columns):
    """Returns one number for each completion, the higher the better; None where it cannot judge one.

    The lists have one entry for each completion. `columns` has those of the data: @COLUMNS@.
    Completions of one prompt are compared, so they must not all earn the same.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    # return [float(right in text) for right, text in zip(columns[@EXAMPLE@], texts)]
    raise NotImplementedError("Write the function `reward` in @FILE@; it must return numbers.")
'''


def write_reward(toml: Path, source: Source, columns: Columns) -> bool:
    """Writes a reward template beside ``toml`` unless it exists. Returns whether the file is still unedited."""
    file = toml.with_name(REWARD_FILE)
    others = [name for name in source.columns if name != columns.prompt]
    text = _TEXT.replace("@TOML@", str(toml)).replace("@FILE@", str(file))
    text = text.replace("@EXAMPLE@", json.dumps(others[0] if others else "answer", allow_nan=False))
    content = text.replace("@COLUMNS@", ", ".join(others) or "there are none").encode()
    if file.exists():
        return file.read_bytes() == content
    write_whole(file, content)
    return True
