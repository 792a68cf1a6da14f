# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""How a run starts, decided from the files, and what a stopped one says about going on."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.config_checks import load_config
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.resume.checkpoint import describe_stop, resume_command
from torchtitan.grpo.resume.kept_record import STATE_KEY, RecordState, RunRecord
from torchtitan.grpo.resume.resumption import (
    CheckpointError,
    Start,
    choose_start,
    describe_finished,
    describe_start,
    is_finished,
)
from torchtitan.grpo.run_folder.launch import LAUNCH_VARIABLE
from torchtitan.grpo.system.files import sums_of, write_sums

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class World:
    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder, self.repository = folder, repository

    def config(self, *arguments: str) -> JobConfig:
        file = self.repository / "train_configs/quickstart.toml"
        given = [f"--job.config_file={file}", f"--job.dump_folder={self.folder / 'run'}"]
        return load_config([*given, "--checkpoint.enable", *arguments])

    def plan(self, *arguments: str) -> Start:
        config = self.config(*arguments)
        return choose_start(config, read_hf_model(config.model.hf_assets_path))

    def describe(self, *arguments: str) -> str:
        return "\n".join(describe_start(self.config(*arguments), self.plan(*arguments)))

    def checkpoint(self, step: int, record: RunRecord | None, **states: Any) -> None:
        states |= {"train_state": {"step": step}}
        if record is not None:
            states[STATE_KEY] = RecordState(record)
        folder = self.folder / f"run/checkpoint/step-{step}"
        dcp.save(states, checkpoint_id=str(folder), no_dist=True)


@pytest.fixture
def world(tmp_path: Path, repository: Path, monkeypatch) -> World:
    monkeypatch.chdir(repository)
    return World(tmp_path, repository)


def test_a_run_over_an_earlier_one_is_refused_with_the_next_free_folder(world):
    assert world.plan().folder is None
    run = world.folder / "run"
    (run / "hf/step-40").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(CheckpointError) as refused:
        world.plan("--checkpoint.no-enable")
    message = str(refused.value)
    assert f"got {run}, with metrics of 1 step and exports (hf) of step 40" in message
    assert f"--job.dump_folder {run}-2" in message and "--job.overwrite" in message
    assert "will be removed (job.overwrite)" in world.describe("--job.overwrite")
    world.checkpoint(40, world.plan("--job.overwrite").record)
    assert world.plan().step == 40, "a run that resumes writes over nothing"
    assert world.plan("--job.overwrite").folder is None
    with pytest.raises(CheckpointError, match=r"Add --checkpoint\.enable to go on from"):
        world.plan("--checkpoint.no-enable")


def test_each_setting_that_differs_is_named_with_what_becomes_of_it(world):
    world.checkpoint(40, world.plan().record)
    assert world.describe() == f"Resumes after step 40 from {world.folder}/run/checkpoint/step-40."
    lines = world.describe(
        "--optimizer.lr=5e-6", "--lr_scheduler.warmup_steps=3", "--training.seq_len=128",
        "--rollout.temperature=0.5", "--prompts.no-share_contexts", "--observe.progress=none",
    ).splitlines()[1:]  # fmt: skip
    assert [line.strip() for line in lines] == [
        "optimizer.lr: 0.0003 -> 5e-06, takes effect from step 41",
        "lr_scheduler.warmup_steps: 10 -> 3, takes effect from step 41",
        "training.seq_len: 256 -> 128, takes effect from step 41",
        "prompts.share_contexts: true -> false, takes effect from step 41",
        "rollout.temperature: 0.8 -> 0.5, takes effect from step 41",
        "Rollouts kept beside the checkpoint were made under the old training.seq_len and "
        "rollout.temperature. They are not used; their prompts are sampled again.",
    ]


def test_another_layout_takes_effect_and_keeps_the_rollouts(world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    world.checkpoint(4, world.plan().record)
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = world.describe("--parallelism.tensor_parallel_degree=2")
    assert "number of ranks: 2 -> 4, takes effect: the checkpoint is laid out anew" in text
    assert "tensor_parallel_degree: 1 -> 2, takes effect: the checkpoint is laid out" in text
    assert not world.plan("--parallelism.tensor_parallel_degree=2").unusable_because


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optimizer.name=Adam", 'optimizer.name must stay "AdamW" .* got "Adam": the checkpoint'),
        ("--debug.seed=7", "debug.seed must stay 0 .* got 7: it orders the prompts"),
        ("--prompts.path=assets/reverse_digits/heldout.jsonl", "prompts.path must stay .*train.jsonl"),
        ("--prompts.no-shuffle", "prompts.shuffle must stay true .* got false"),
        ("--checkpoint.load_step=7", r"load_step must be .* got 7\. There is step 40\."),
    ],
)  # fmt: skip
def test_what_the_state_depends_on_cannot_be_changed(world, argument, message):
    world.checkpoint(40, world.plan().record)
    with pytest.raises(CheckpointError, match=message):
        world.plan(argument)


TWO = (
    "--prompts.path=", "--evaluation.environment=short", "--prompts.template={prompt}",
    "--environments.short.weight=1", "--environments.long.weight=2",
    *(f"--environments.{n}.prompts.path=assets/reverse_digits/train.jsonl" for n in ("short", "long")),
    "--environments.long.agent.function=verifiers",
)  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "effect"),
    [
        (
            "--environments.long.weight=3",
            r"long\.weight must stay 2 .* got 3: the checkpoint's place",
        ),
        ("--environments.long.prompts.path=assets/reverse_digits/heldout.jsonl", r"path must stay"),
        ("--environments.new={prompts={path='a.jsonl'}, weight=1}", "new.* must stay not set"),
        ("--environments.long.reward.functions=exact_match", "are not used"),
        ("--environments.long.rollout.max_new_tokens=7", "are not used"),
        ("--environments.long.prompts.template={prompt}!", "are not used"),
        ("--environments.long.agent.timeout_seconds=3", "takes effect from step 41"),
    ],
)
def test_a_changed_environment_is_as_a_change_of_the_run(world, argument, effect):
    world.checkpoint(40, world.plan(*TWO).record)
    assert len(world.describe(*TWO).splitlines()) == 1, "nothing has changed"
    if "must stay" in effect:
        with pytest.raises(CheckpointError, match=effect):
            world.plan(*TWO, argument)
    else:
        assert effect in world.describe(*TWO, argument)
    with pytest.raises(CheckpointError, match=r"prompts\.path must stay"):
        world.plan()  # without environments


def test_a_model_that_has_moved_is_known_and_one_with_other_weights_or_sizes_is_refused(world):
    world.checkpoint(40, world.plan().record)
    folder = world.folder / "model"
    shutil.copytree(world.repository / "assets/reverse_digits/model", folder)
    argument = f"--model.hf_assets_path={folder}"
    assert [change.key for change in world.plan(argument).changes] == ["model.hf_assets_path"]
    (file,) = folder.glob("*.safetensors")
    weights = {name: tensor + 1e-3 for name, tensor in load_file(file).items()}
    save_file(weights, file)
    with pytest.raises(CheckpointError, match="which holds other weights: a resumed run has the"):
        world.plan(argument)
    record = world.plan().record
    sizes = record.model_sizes | {"n_layers": "28"}
    world.checkpoint(50, msgspec.structs.replace(record, model_sizes=sizes))
    with pytest.raises(CheckpointError, match=r"with n_layers = 28 \(.*\), got n_layers = 4"):
        world.plan()


def test_more_steps_do_not_make_the_learning_rate_jump(world):
    decaying = "--lr_scheduler.decay_ratio=1.0"
    world.checkpoint(150, world.plan(decaying).record)
    assert world.plan(decaying).record.schedule_steps == 150
    longer = world.plan(decaying, "--training.steps=300")
    assert longer.record.schedule_steps == 150
    text = world.describe(decaying, "--training.steps=300")
    assert "training.steps: 150 -> 300, takes effect: the run ends after step 300" in text
    assert "The learning rate goes on without a jump (2.14e-06 in step 151): its schedule" in text
    assert "Add --lr_scheduler.total_steps 300" in text
    world.checkpoint(200, longer.record)
    assert world.plan(decaying, "--training.steps=300").record.schedule_steps == 150
    # Whoever sets the schedule or the rate anew gets it over the whole run.
    for asked in ("--lr_scheduler.total_steps=300", "--optimizer.lr=1e-5"):
        assert world.plan(decaying, "--training.steps=300", asked).record.schedule_steps == 300


def test_a_new_rate_of_muon_gets_the_schedule_over_the_whole_run(world):
    muon = ("--optimizer.name=Muon", "--lr_scheduler.decay_ratio=1.0")
    world.checkpoint(150, world.plan(*muon).record)
    longer = (*muon, "--training.steps=300")
    assert world.plan(*longer).record.schedule_steps == 150
    assert world.plan(*longer, "--optimizer.muon_lr=1e-3").record.schedule_steps == 300


def test_a_warm_up_that_is_longer_than_the_run_is_told_as_what_is_used(world):
    used = "so it rises over 4 (lr_scheduler.warmup_steps is 10)"
    assert used in world.describe("--training.steps=4", "--lr_scheduler.warmup_steps=10")
    assert "it rises" not in world.describe("--training.steps=4", "--lr_scheduler.warmup_steps=4")


def test_the_date_of_the_first_start_stays_over_any_number_of_resumes(world):
    fresh, first = world.plan().record, "2024-02-29T00:00:00"
    assert fresh.date > "2026"
    world.checkpoint(40, msgspec.structs.replace(fresh, date=first))
    for step in (50, 60):
        record = world.plan("--optimizer.lr=1e-5").record
        assert record.date == first
        world.checkpoint(step, record)
    assert world.plan("--job.overwrite").record.date > "2026"
    world.checkpoint(80, msgspec.structs.replace(fresh, date=""))  # of an earlier release
    assert world.plan().record.date >= fresh.date


def test_a_checkpoint_without_a_record_is_resumed_with_the_settings_of_the_start(world):
    world.checkpoint(40, None)
    start = world.plan("--optimizer.lr=1e-5")
    assert (start.step, start.kept, start.changes) == (40, None, [])
    assert "written without a record" in world.describe()


def test_a_checkpoint_of_the_model_alone_or_without_the_reference_is_refused(world):
    record = world.plan().record
    folder = world.folder / "run/checkpoint/step-40"
    dcp.save({"weight": torch.ones(1)}, checkpoint_id=str(folder), no_dist=True)
    with pytest.raises(CheckpointError, match="must resume from a whole checkpoint"):
        world.plan()
    shutil.rmtree(folder)
    world.checkpoint(40, record)
    with pytest.raises(CheckpointError, match="must resume from a checkpoint that holds its ref"):
        world.plan("--grpo.kl_coef=0.1", "--grpo.ref_model_ema=0.9")


def test_newer_checkpoints_that_a_run_goes_back_behind_are_named(world):
    for step in (20, 40, 60):
        world.checkpoint(step, world.plan("--job.overwrite").record)
    text = world.describe("--checkpoint.load_step=20")
    assert "Newer checkpoints stay in that folder (step 40, step 60)" in text


def test_a_run_is_finished_when_its_steps_its_export_and_its_summary_are_there(world):
    world.checkpoint(150, world.plan().record)
    config, start = world.config(), world.plan()
    assert not is_finished(config, start), "it was killed before its end"
    (world.folder / "run/hf/step-150").mkdir(parents=True)
    (world.folder / "run/summary.json").write_text("{}")
    assert is_finished(config, start)
    assert "is finished: it has taken 150 steps" in describe_finished(config, start)
    assert not is_finished(world.config("--training.steps=200"), start)
    assert not is_finished(config, replace(start, folder=None))
    export = world.folder / "run/hf/step-150"
    names = ("model.safetensors", "config.json")
    for name in names:
        (export / name).write_text("as it was")
    write_sums(export / "sums_export.json", sums_of(export / name for name in names))
    (export / "config.json").write_text("edited by the user")
    assert is_finished(config, start)
    for damage in ("as it is", "as it was, and more", None):
        weights = export / "model.safetensors"
        weights.unlink() if damage is None else weights.write_text(damage)
        assert not is_finished(config, start), "it is exported again"
    weights.write_text("as it was")
    assert is_finished(config, start)
    (export / "sums_export.json").write_text("{")
    assert not is_finished(config, start)


@pytest.mark.parametrize("damaged", [".metadata", "data", "record"])
def test_the_checkpoint_before_a_damaged_one_is_taken_and_the_damage_is_named(world, damaged: str):
    world.checkpoint(4, world.plan().record)
    folder = world.folder / "run/checkpoint/step-4"
    if damaged == "record":
        shutil.rmtree(folder)
        states = {"train_state": {"step": 4}, STATE_KEY: {"json": '{"settings": {'}}
        dcp.save(states, checkpoint_id=str(folder), no_dist=True)
    else:
        for file in folder.glob(".metadata" if damaged == ".metadata" else "*.distcp"):
            file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"all in .* are damaged \(step 4: "):
        world.plan()
    with pytest.raises(CheckpointError, match=r"step-4 cannot \(.+--checkpoint\.load_step"):
        world.plan("--checkpoint.load_step=4")
    for step in (2, 3):
        world.checkpoint(step, world.plan("--job.overwrite").record)
    start = world.plan()
    assert (start.step, list(start.damaged), start.newer_steps) == (3, [4], [])
    assert world.describe().startswith("The checkpoint of step 4 is damaged and is not used (")


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> JobConfig:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.checkpoint.enable = True
    (tmp_path / "checkpoint/step-40").mkdir(parents=True)
    (tmp_path / "checkpoint/step-40/.metadata").touch()
    return config


def test_the_checkpoint_the_rollouts_and_the_command_are_named(config, tmp_path):
    arguments = ["--job.config_file", "my run.toml", "--checkpoint.enable"]
    text = describe_stop(config, 40, 37, arguments)
    assert text == (
        f"Stopped after step 40. The checkpoint is {tmp_path}/checkpoint/step-40; 37 rollouts in "
        "flight are kept with it. To go on:\n    torchtitan-grpo train --nproc 2 "
        "--job.config_file 'my run.toml' --checkpoint.enable"
    )
    assert "could not be kept" in describe_stop(config, 40, None, arguments)


def test_the_command_begins_no_new_run_and_goes_back_to_no_older_step(config, tmp_path):
    load_step = "--checkpoint.load_step"
    arguments = ["--job.overwrite", "--a=b", load_step, "20", f"{load_step}=3"]
    begin = f"--job.no-overwrite {load_step}"
    assert resume_command(config, arguments, None).endswith(f"--nproc 2 --a=b {begin}=-1")
    (tmp_path / "checkpoint/step-60").mkdir()  # of steps that were taken again
    (tmp_path / "checkpoint/step-60/.metadata").touch()
    assert describe_stop(config, 40, 0, arguments).endswith(f"--a=b {begin}=40")
    config.job.overwrite, config.checkpoint.load_step = True, 20  # in the file
    command = resume_command(config, ["--a=b"], None)
    assert command.endswith(f"--a=b {begin}=-1")


def test_the_command_of_a_resumed_run_resumes_it_again_and_shows_no_key(config):
    first = ["--a=b", "--job.no-overwrite", "--checkpoint.load_step=-1"]
    assert resume_command(config, first, None).endswith(" ".join(["train --nproc 2", *first]))
    # The value of a flag goes with the flag.
    command = resume_command(config, ["--job.overwrite", "true", "--a", "b"], None)
    assert command.endswith("train --nproc 2 --a b --job.no-overwrite")
    assert "secret" not in describe_stop(config, 40, 0, ["--inference.api_key", "secret"])


def test_a_run_without_a_checkpoint_says_why(config):
    assert describe_stop(config, 0, 0, []).endswith("because the run had taken no step.")
    config.checkpoint.enable = False
    assert describe_stop(config, 40, 0, []).endswith("because checkpoint.enable is false.")


def test_a_run_on_several_nodes_names_the_command_of_the_nodes(config, monkeypatch):
    launch = "bash scripts/launch_multinode.sh x.toml --nnodes 2 --rdzv-endpoint a:29400"
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    arguments = ["--job.config_file", "x.toml", "--job.overwrite", "--training.steps=9"]
    assert resume_command(config, arguments, None) == (
        f"{launch} -- --training.steps=9 --job.no-overwrite\n"
        "on each node, with its own --nproc and --interface, if these are given."
    )
