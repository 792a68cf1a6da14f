"""The console script."""

import pytest

from torchtitan.grpo import cli


def test_check_config_prints_the_resolved_configuration(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository)
    monkeypatch.setenv("WORLD_SIZE", "2")
    status = cli.check_config(["train_configs/quickstart.toml", "--grpo.group_size", "4"])
    out = capsys.readouterr().out
    assert status == 0
    assert "group_size = 4" in out
    assert "Qwen3ForCausalLM" in out


def test_check_config_names_what_is_wrong(capsys, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("[grpo]\ngroup_sise = 4\n")
    assert cli.check_config([str(file)]) == 2
    assert "Did you mean grpo.group_size?" in capsys.readouterr().err


def test_an_unknown_subcommand_shows_the_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torchtitan-grpo", "trian"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "check-config" in capsys.readouterr().err
