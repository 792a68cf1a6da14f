# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every setting can be given on the command line, in every spelling."""

import functools
import json
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.grpo.config import ClusterRow
from torchtitan.grpo.config.command_line import ConfigError
from torchtitan.grpo.config.command_line.arguments import is_flag, members
from torchtitan.grpo.config.command_line.keys import row_type
from torchtitan.grpo.config.command_line.keys import settings as all_settings
from torchtitan.grpo.config.command_line.reading import read_config
from torchtitan.grpo.config.job_config import JobConfig

KEYS = all_settings(JobConfig)
# It names a file that is read at once.
OPENED = {"job.config_file"}
# They are refused on the command line.
SECRET = {"inference.api_key", "inference.admin_key", "teacher.api_key"}
SETTINGS = sorted(set(KEYS) - OPENED - SECRET)
ANY = st.one_of(st.integers(-9, 9), st.booleans(), st.text("abc xyz", min_size=1))


def values(annotation: Any) -> st.SearchStrategy:
    if len(of_union := members(annotation)) > 1:
        if list in map(get_origin, of_union):  # where text would stand for a list as well
            of_union = tuple(m for m in of_union if m is not str)
        return st.one_of([st.none() if m is type(None) else values(m) for m in of_union])
    (annotation,) = of_union
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is list:
        return st.lists(values(get_args(annotation)[0]), max_size=3)
    if row_type(annotation):
        return st.just({})  # rows are read as a table is
    if get_origin(annotation) is dict:
        of_keys = values(get_args(annotation)[1])
        return st.dictionaries(st.text("ab", min_size=1), of_keys, max_size=3)
    simple = {
        bool: st.booleans(),
        int: st.integers(-(10**12), 10**12),
        float: st.floats(allow_nan=False),
        str: st.text("abcZ09 ._-=/{}:,'\"\\é", max_size=12),
        Any: ANY,
    }
    return simple[annotation]


def written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def read(key: str, *arguments: str) -> Any:
    value: Any = read_config(list(arguments))
    for name in key.split("."):
        value = getattr(value, name)
    return value


def dashed(key: str) -> str:
    return key.replace("_", "-")


def test_every_setting_is_read_back_from_one_command_line():
    def all_of(config) -> dict[str, Any]:
        return {key: functools.reduce(getattr, key.split("."), config) for key in SETTINGS}

    defaults = all_of(JobConfig())
    given = [f"--{dashed(key)}={written(value)}" for key, value in defaults.items()]
    assert all_of(read_config(given)) == defaults


ONE_OF_EACH_TYPE = sorted({str(members(KEYS[key])): key for key in SETTINGS}.values())


@pytest.mark.parametrize("key", ONE_OF_EACH_TYPE)
@settings(max_examples=20)
@given(data=st.data())
def test_any_value_is_read_back_in_each_spelling(key, data):
    value = data.draw(values(KEYS[key]))
    text = written(value)
    assert read(key, f"--{key}={text}") == value
    assert read(key, f"--{dashed(key)}={text}") == value
    if not text.startswith("--"):
        assert read(key, f"--{key}", text) == value
    if is_flag(KEYS[key]):
        table, _, name = key.rpartition(".")
        assert read(key, f"--{table}.{'' if value else 'no-'}{name}") is value


def test_a_key_inside_of_a_setting_that_is_a_table_is_set_alone(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("[rollout.environment_options]\nmax-calls = 2\nname = 'a'\n")
    config = f"--job.config_file={file}"
    key = "rollout.environment_options"
    assert read(key, config, f"--{key}.max-calls", "3") == {"max-calls": 3, "name": "a"}
    added = read(key, config, f"--{key}.tool.url=x")
    assert added == {"max-calls": 2, "name": "a", "tool.url": "x"}
    assert read(key, config, f"--{key}", "{name = 'b'}") == {"name": "b"}
    named = ["--environments.a-b.reward.functions", "x", "y", "--environments.a-b.prompts.path=1"]
    read_back = {"a-b": {"reward": {"functions": ["x", "y"]}, "prompts": {"path": "1"}}}
    assert read("environments", *named) == read_back
    rows = [
        "--cluster.a-b.tags",
        "train,rollout",
        "--cluster.c",
        "{tags = ['rollout'], gpus = [1]}",
    ]
    read_back = {"a-b": ClusterRow(["train", "rollout"]), "c": ClusterRow(["rollout"], 1, [1])}
    assert read("cluster", *rows) == read_back
    assert read("cluster", *rows, "--cluster={d = {num_servers = 2}}") == {"d": ClusterRow([], 2)}
    # A table keeps what is not named.
    options = ["--grpo.group_size=3", "--grpo", "{clip_low = 0, policy_loss = 'gspo'}"]
    grpo = read("grpo", *options)
    assert (grpo.group_size, grpo.clip_low, grpo.policy_loss) == (3, 0.0, "gspo")
    assert isinstance(grpo.clip_low, float)
    with pytest.raises(ConfigError, match=r"Unknown key clip_lo.*Did you mean clip_low"):
        read("grpo", "--grpo", "{clip_lo = 0}")


def test_lists_numbers_below_zero_and_the_last_of_several_values():
    for words, value in (
        (["a.jsonl,b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (['["a,b.jsonl", "c"]'], ["a,b.jsonl", "c"]),
        ([""], []),
        (["[]"], []),
    ):
        assert read("prompts.paths", "--prompts.paths", *words) == value
    assert read("prompts.weights", "--prompts.weights", "1", "0.5") == [1.0, 0.5]
    assert read("prompts.weights", "--prompts.weights=1,0.5") == [1.0, 0.5]
    assert read("rollout.top_k", "--rollout.top_k", "-1") == -1
    assert read("inference.extra_args", "--inference.extra_args=--a,--b=2") == ["--a", "--b=2"]
    assert read("grpo.group_size", "--grpo.group_size=3", "--grpo.group-size", "5") == 5


def test_an_argument_without_a_setting_is_refused():
    with pytest.raises(ConfigError, match=r"Unexpected argument 'stray': .*--table\.key value"):
        read_config(["stray", "--grpo.group_size=4"])
