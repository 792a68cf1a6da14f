"""The console script checks configurations and names what is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from torchtitan.grpo.commands import cli
from torchtitan.grpo.commands.evaluate import print_table
from torchtitan.grpo.rollout.results import EvaluationResult, SetResult


def test_check_config_begins_with_what_matters(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Most prompts are longer than what 24 tokens leave beside a completion of 18.
    short = ["--training.seq_len", "24", "--rollout.max_new_tokens", "18"]
    assert cli.run(["check-config", "train_configs/quickstart.toml", *short]) == 0
    out = capsys.readouterr().out
    assert "group_size = " not in out
    assert len(out.splitlines()) < 50
    titles = ["Start", "  model:", "  prompts.path:", "  weights:", "warning:", "Layout"]
    places = [f"\n{out}".index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    (fits,) = [line for line in out.splitlines() if "rows checked" in line]
    (warning,) = [line for line in out.splitlines() if line.startswith("warning: prompts.path")]
    fitting = fits.split("; ")[1].split(" of ")[0]
    assert fits == f"    all 4,096 rows checked; {fitting} of 4,096 prompts fit"
    assert f"only {fitting} of 4,096 prompts" in warning and "at most 6 tokens" in warning
    shown = "check-config train_configs/quickstart.toml --grpo.group_size 4 --settings"
    assert cli.run(shown.split()) == 0
    out = capsys.readouterr().out
    assert out.index("Qwen3ForCausalLM") < out.index("Layout") < out.index("group_size = 4")


def test_check_config_counts_the_ranks_that_train_would_start(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.run(["check-config", "train_configs/quickstart_tensor_parallel.toml"]) == 0
    assert "ranks: 2 = 2 tensor parts" in capsys.readouterr().out
    assert cli.run(["check-config", "train_configs/quickstart.toml", "--nproc", "4"]) == 0
    assert "ranks: 4 = 4 shards" in capsys.readouterr().out
    assert "WORLD_SIZE" not in os.environ


def test_check_config_fails_if_the_folder_holds_a_run(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["check-config", "train_configs/quickstart.toml", f"--job.dump_folder={tmp_path}"]
    assert cli.run(command) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    capsys.readouterr()
    assert cli.run(command) == 2
    out = capsys.readouterr().out
    assert "would be refused: job.dump_folder must not hold an earlier run" in out
    assert "reward.functions: partial_match" in out, "the inputs are checked all the same"


def test_an_unknown_subcommand_shows_the_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torchtitan-grpo", "trian"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: unknown command 'trian'")
    assert "check-config" in err


def test_versions_are_shown(capsys):
    assert cli.run(["--version"]) == cli.run(["versions"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"torchtitan-grpo {cli.version()}\n")
    assert "\ntorch " in out and "\ntransformers " in out


def start(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    # What the installed script does, with the list of what has been imported at the end.
    program = "import atexit, sys, torchtitan_grpo\n" + (
        "atexit.register(lambda: print('imported torch:', 'torch.cuda' in sys.modules))\n"
        "torchtitan_grpo.main()"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage: torchtitan-grpo COMMAND"),
        (["train", "x.toml", "--help", "clip_high"], 0, "DAPO uses 0.28"),
        (["train", "x.toml"], 2, "--job.config_file must name a file that exists, got x.toml"),
        (["train"], 2, "A configuration must be named"),
        (["init", "--help"], 0, "--prompt-column"),
        (["init", "nowhere", "x.jsonl"], 2, "MODEL must be a folder with config.json"),
    ],
)
def test_what_needs_no_torch_starts_without_it(arguments, status, said, tmp_path):
    result = start(*arguments, folder=tmp_path)
    assert result.returncode == status, result.stderr
    assert said in result.stdout + result.stderr
    assert "imported torch: False" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_checkpoint_of_adapters_is_not_evaluated(capsys):
    command = ["evaluate", "train_configs/quickstart_lora.toml", "--checkpoint", "newest"]
    assert cli.run(command) == 2
    assert "--checkpoint cannot be used with lora.rank above 0, got 16" in capsys.readouterr().err


def test_the_table_of_an_evaluation_is_whole_where_no_terminal_is(capsys):
    name, function = "held-out-problems-of-the-competition", "rewards/answers.py:has_equal_answer"
    of_set = SetResult(name, function, 0.625, 16, 128, {1: 0.625, 4: 0.875}, 7.0, 8, 0.25, ())
    print_table(EvaluationResult((of_set,), 3, 3, 0.0, 1.5))
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert " ".join(head) == "set function score pass@1 pass@4 tokens longest cut prompts n"
    assert row == [name, function, "0.6250", "0.6250", "0.8750", "7.0", "8", "25.0%", "16", "8"]


@pytest.mark.parametrize("as_option", [True, False])
def test_quantised_weights_are_refused_before_a_server_is_started(
    as_option, repository, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(repository)
    model = shutil.copytree("assets/reverse_digits/model", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].char()
    save_file(tensors, model / "model.safetensors")
    given = ["--model", str(model)] if as_option else [f"--model.hf_assets_path={model}"]
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    assert cli.run(["evaluate", "train_configs/quickstart.toml", folder, *given]) == 2
    said = capsys.readouterr().err
    assert "bfloat16" in said and str(model) in said
    assert not (tmp_path / "run").exists()
