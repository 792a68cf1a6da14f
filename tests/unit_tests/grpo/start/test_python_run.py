# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan.grpo.run`` up to the start of the run: what it takes, refuses and writes."""

import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from light import LIGHT
from processes import descendants

from torchtitan.grpo import Run, RunError, run
from torchtitan.grpo.config import Reward
from torchtitan.grpo.rewards.reward_loading import load_function, short_names
from torchtitan.grpo.rewards.scoring_pool import RewardPool
from torchtitan.grpo.start import from_python
from torchtitan.grpo.start.from_python import _in_python, _read, _tables, _words
from torchtitan.grpo.start.function_files import FunctionFiles
from torchtitan.grpo.system import child
from torchtitan.grpo.system.functions import user_line
from torchtitan.grpo.types import Prompt

PROMPT = Prompt(0, "2+2=", np.array([1], np.int32), {"answer": "4"})


def test_importing_the_package_imports_nothing_large(tmp_path):
    program = LIGHT + (
        "import sys, torchtitan.grpo\n"
        "loaded = {'torch', 'cloudpickle', 'msgspec', 'tomllib'} & {*sys.modules}\n"
        "from torchtitan.grpo import system\n"  # a module, not an export
        "print(loaded, system.__name__, hasattr(torchtitan.grpo, 'rum'))"
    )
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert out == "set() torchtitan.grpo.system False\n"


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 5}, r'by table, such as training=\{"steps": 5\}, got steps=5'),
        ({"training": {"stepz": 5}}, r'training.stepz. Did you mean training=\{"steps": ...\}\?'),
        ({"trainign": {"steps": 5}}, r'setting trainign.steps. There is training.steps'),
        ({"training": {"steps": "many"}}, r"training=.* must be an integer, got 'many'. Change it in run\(\)"),
        ({"training": {"steps": len}}, r"training=.* must be an integer, got '.*py:len'"),
        ({"inference": {"api_key": "abc"}}, r"set the environment variable TORCHTITAN_GRPO_API_KEY"),
        ({"ranks": 0}, r"ranks must be a number of ranks, at least 1, got '0'"),
        ({"reward": 3}, r"reward=.*functions.* must be a list.*got '\[3\]'"),
        ({"reward": lambda **kw: LOCK}, r"pickled.*failed for function with TypeError: cannot pickle"),
        ({"job": {"dump_folder": "~/out"}}, r"job.dump_folder must be .*only a shell replaces ~"),
        ({"config": "missing.toml"}, r"must name a file that exists, got missing.toml"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_before_anything_is_started(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with pytest.raises(RunError, match=f"(?i){message}"):
        run(**{"config": {"job": {"dump_folder": "out"}}} | arguments)
    assert not [*tmp_path.iterdir()]


def test_settings_arrive_as_a_file_would_give_them(tmp_path):
    config = {
        "job": {"dump_folder": tmp_path},
        "training": {"steps": np.int64(7), "seq_len": 64},
        "optimizer": {"lr": np.float64(1e-5)},
        "prompts": {"path": "a,b.jsonl", "rename": {"question": "prompt"}},
        "reward": {"functions": ["exact_match"], "weights": (1, np.float32(0.5))},
        "grpo": {"async_weight_update": False},
    }
    settings = {"training": {"steps": 9}, "debug": {"seed": None}}
    tables = _tables(config, ["partial_match", len], settings)
    read = _read([*_words(tables, lambda function: f"x.py:{function.__name__}")])
    assert (read.job.dump_folder, read.prompts.path) == (str(tmp_path), "a,b.jsonl")
    assert (read.training.steps, read.training.seq_len, read.optimizer.lr) == (9, 64, 1e-5)
    assert read.reward.functions == ["partial_match", "x.py:len"]
    assert read.reward.weights == [1.0, 0.5] and read.prompts.rename == {"question": "prompt"}
    assert read.debug.seed is None and not read.grpo.async_weight_update


def test_a_run_that_nobody_keeps_is_ended_with_a_message(repository, tmp_path, capsys):
    def start() -> Run:
        file = repository / "train_configs/quickstart.toml"
        return run(file, job={"dump_folder": str(tmp_path)}, quiet=True)

    start()
    assert "loop over it, or call its result()" in capsys.readouterr().err
    assert not descendants("torchtitan_grpo.py")
    with start() as kept:
        assert descendants("torchtitan_grpo.py")
    assert not descendants("torchtitan_grpo.py")
    assert [*kept] == [], "nothing is left to wait for"
    with pytest.raises(
        RunError, match=f"(?s)ended the run before its last.*{tmp_path}/from_python"
    ):
        kept.result()
    assert capsys.readouterr() == ("", "")


# What a forked process does with its copy of the run: none of it is the run's end.
FORKED = {
    "exits": lambda run: sys.exit(0),
    "closes": lambda run: run.close(),
    "leaves a loop": lambda run: [None for _ in zip([0], run)],  # noqa: B905
    "leaves a block": lambda run: run.__exit__(None, None, None),
    "collects": lambda run: gc.collect(),
    "fails": lambda run: 1 / 0,
}
FORKING = (
    LIGHT
    + """
import os, sys
sys.path.append(sys.argv[2])
from test_python_run import FORKED
from torchtitan.grpo.start import from_python

real = from_python.start_child
waiting = [sys.executable, "-c", "import time; print('begins', flush=True); time.sleep(600)"]
from_python.start_child = lambda command, **more: real(waiting, **more)
run = from_python.run({"job": {"dump_folder": "out"}}, quiet=True)
if os.fork() == 0:
    if sys.argv[1] == "leaves a loop":
        run._wait = lambda: False
        run._steps.take = lambda: [{}]
    FORKED[sys.argv[1]](run)
    run = None
    sys.exit(0)
os.wait()
print(run._child.poll(), flush=True)
run.close()
print(run._child.poll(), flush=True)
"""
)


@pytest.mark.parametrize("what", FORKED)
def test_the_end_of_a_forked_process_is_not_that_of_the_run(tmp_path, what):
    command = [sys.executable, "-c", FORKING, what, str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == f"None\n{-signal.SIGTERM}\n", done.stderr


@pytest.mark.parametrize("moment", ["before the start", "after it"])
def test_ctrl_c_while_a_run_is_started_leaves_nothing_behind(tmp_path, monkeypatch, moment):
    started = []

    def start_child(command, **more):
        if moment == "before the start":
            signal.raise_signal(signal.SIGINT)
        started.append(child.start_child(["sleep", "600"], **more))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(from_python, "start_child", start_child)
    try:
        with pytest.raises(KeyboardInterrupt):
            run({"job": {"dump_folder": str(tmp_path)}}, quiet=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [each.poll() for each in started] == [-signal.SIGTERM]


async def test_functions_of_any_kind_are_called_in_a_worker(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/beside_the_script.py").write_text("def double(x):\n    return 2.0 * x\n")
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    import beside_the_script  # pyright: ignore[reportMissingImports]

    main = {"__name__": "__main__", "SHARE": 0.25}
    exec(
        "def of_main(prompts, completions, **columns):\n    return [SHARE for _ in completions]",
        main,
    )
    bonus = 3.0

    def closure(completions, answer, **columns):
        return [beside_the_script.double(bonus) * (c == a) for c, a in zip(completions, answer)]  # noqa: B905

    def constant(completions, value, **columns):
        return [value for _ in completions]

    class Scorer:
        def __call__(self, completions, **columns):
            return [float(len(c)) for c in completions]

    given = [
        (main["of_main"], "of_main", 0.25), (closure, "closure", 6.0), (Scorer(), "Scorer", 1.0),
        (functools.partial(constant, value=2.0), "constant", 2.0),
        (lambda completions, **kw: [5.0] * len(completions), "function", 5.0),
        (lambda completions, **kw: [7.0] * len(completions), "function_2", 7.0),
    ]  # fmt: skip
    files = FunctionFiles(tmp_path / "run")
    settings = [files.setting(function) for function, _, _ in given]
    files.write()
    assert short_names(settings) == [name for _, name, _ in given]
    pool = RewardPool(settings, Reward(timeout_seconds=60))
    try:
        await pool.start()
        scored = await pool.score(PROMPT, ["4"], [[1]])
    finally:
        await pool.close()
    assert scored.values == [[value] for _, _, value in given]


def test_a_resumed_run_finds_the_file_of_its_function_unchanged(tmp_path):
    def make(share: float):
        def right(completions, **columns):
            return [share for _ in completions]

        return right

    def written(function) -> list[Path]:
        files = FunctionFiles(tmp_path)
        files.setting(function)
        files.write()
        return sorted(tmp_path.iterdir())

    first = written(make(1.0))
    times = [file.stat().st_mtime_ns for file in first]
    assert written(make(1.0)) == first and [f.stat().st_mtime_ns for f in first] == times
    assert len(written(make(0.5))) == 4, "another function does not replace the file of a run"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Add --lr_scheduler.total_steps 300 to lay it", 'Add lr_scheduler={"total_steps": 300} to lay it'),
        ("Use --job.overwrite, which removes it", 'Use job={"overwrite": True}, which removes it'),
        ("Without a GPU: --nproc 2.", "Without a GPU: ranks=2."),
        ("--nproc must be a multiple of 2", "ranks must be a multiple of 2"),
        ("--rollout.top_p=0.5.", 'rollout={"top_p": 0.5}.'),
        ("Unknown argument --grpo.bta. Did you mean --grpo.beta?", 'Unknown setting grpo.bta. Did you mean grpo={"beta": ...}?'),
        ("Unknown option --grpo.kl_beta. ", "Unknown setting grpo.kl_beta. "),
        ("use --job.dump_folder outputs/replaced-20261128-1; to", 'use job={"dump_folder": "outputs/replaced-20261128-1"}; to'),
        ("use --job.dump_folder /a/b.c.", 'use job={"dump_folder": "/a/b.c"}.'),
        ("(--model.hf_assets_path <dump_folder>/hf/step-N).", '(model={"hf_assets_path": "<dump_folder>/hf/step-N"}).'),
        ("Try --weight_sync.transport host.", 'Try weight_sync={"transport": "host"}.'),
        ("Set --weight_sync.transport host, or", 'Set weight_sync={"transport": "host"}, or'),
        ("Set --grpo.beta instead.", 'Set grpo={"beta": ...} instead.'),
        ("--checkpoint.enable to go on", 'checkpoint={"enable": ...} to go on'),
        ("--checkpoint.load_step=-1", 'checkpoint={"load_step": -1}'),
        ("--gpus (or --nproc) must be", "ranks must be"),
        ("Start other ranks (--gpus N).", "Start other ranks (ranks=N)."),
        ("--gpus needs a GPU. On CPU, --nproc N sets", "ranks needs a GPU. On CPU, ranks=N sets"),
        ("training.steps must be above 0 -- got -1", "training.steps must be above 0 -- got -1"),
    ],
)  # fmt: skip
def test_advice_is_in_pythons_words(text, advice):
    assert _in_python(text) == advice


_NUMBERS = itertools.count()


def _fails(completions, **columns):
    return [1 / len(c) for c in completions]


class _Fails:
    def __call__(self, completions, **columns):
        return [_fails([c]) for c in completions]


@pytest.mark.parametrize(
    "function",
    [_fails, _Fails(), lambda completions, **kw: _fails(completions), functools.partial(_fails, more=1)],
)  # fmt: skip
def test_an_error_in_a_function_is_told_with_the_line_of_the_users_file(function, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        files = FunctionFiles(tmp_path)
        setting = files.setting(function)
        files.write()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    loaded = load_function(setting)
    with pytest.raises(ZeroDivisionError) as caught:
        loaded(completions=[""])
    line = user_line(caught.value, loaded)
    assert re.search(rf"\(at {__file__}:\d+, in .*: return \[1 / len\(c\)", line), line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import math\n\n\nX = math.nope\n", r":4, in <module>: X = math.nope\)"),
        ("def f():\n    return {}['x']\nf()\n", r":2, in f: return \{\}\['x'\]\)"),
        ("import json\njson.loads('{')\n", r"reward_file.*\.py.*:2|decoder\.py"),
        ("def f(:\n", r"reward_file\d\.py, line 1\)"),
        ("import nothing_of_this_name\n", r":1, in <module>: import nothing_of_this_name\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_module", [True, False])
def test_an_error_while_a_file_is_loaded_is_told_with_its_line(
    text, said, is_module, tmp_path, monkeypatch
):
    name = f"reward_file{next(_NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=said):
        load_function(f"{name}:f" if is_module else f"{tmp_path}/{name}.py:f")
