# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``torchtitan.grpo.run``: the run of ``torchtitan-grpo train``, from a Python script or a notebook."""

import codecs
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torchtitan.grpo.config.command_line import ConfigError, refusing
from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.observe.run_log import NewRecords
from torchtitan.grpo.run_folder.folder import FolderError, check_folder
from torchtitan.grpo.run_folder.start_record import toml_value
from torchtitan.grpo.start.function_files import FunctionFiles
from torchtitan.grpo.start.train import parse, read_settings
from torchtitan.grpo.system.child import describe_status, open_log, start_child, stop_children
from torchtitan.grpo.system.errors import RunFailed

Tables = Mapping[str, Mapping[str, Any]]
"""Settings by table and name, as in the TOML file."""

RewardSetting = Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | Mapping[str, Any]

SUBFOLDER = "from_python"
"""Folder in ``job.dump_folder`` for pickled functions and the output of runs from Python."""

_PROGRAM = Path(__file__).resolve().parents[3] / "torchtitan_grpo.py"
_LOOK_SECONDS = 0.1
# torchrun's agent kills ranks 10 s after the time that they have to end in order.
_MARGIN_SECONDS = 15.0
_REASON_CHARS, _REASON_LINES = 4000, 20


def run(
    config: str | os.PathLike[str] | Tables,
    *,
    reward: RewardSetting | None = None,
    ranks: int | None = None,
    quiet: bool = False,
    **settings: Mapping[str, Any],
) -> "Run":
    """Starts a run in processes of its own, and returns at once with a handle to it.

    Example::

        for step in run("train_configs/quickstart.toml", reward=reward, training={"steps": 5}):
            print(step["step"], step["reward/mean"])

    Args:
        config: a TOML file, or its tables as dictionaries. A setting that names a function takes
            the function itself as well.
        reward: ``reward.functions``, as one function or a list of functions and names, or the whole
            table ``[reward]``, such as ``{"functions": [right, short], "weights": [1.0, 0.2]}``.
            Functions are pickled by cloudpickle, and called in other processes.
        ranks: number of training ranks; by default as many as ``torchtitan-grpo train`` starts.
        quiet: do not print the output of the run; a file in the run's folder always has it.
            Lines of steps are printed only if ``observe.progress`` asks for them.
        settings: tables whose settings take precedence over those of ``config``.

    Raises:
        RunError: for settings that do not exist or have the wrong type, functions that cannot be
            pickled, and a folder that cannot be written. The run itself finds all other errors, which
            the loop over its steps and :meth:`Run.result` then raise.
    """
    tables = _tables(config, reward, settings)
    start = [] if ranks is None else [f"--nproc={ranks}"]
    if not isinstance(config, Mapping):
        start.append(f"--job.config_file={os.fspath(config)}")
    job = {name: table for name, table in tables.items() if name == "job"}
    folder = Path(_read([*start, *_words(job, str)]).job.dump_folder, SUBFOLDER)
    files = FunctionFiles(folder)
    words = [*start, *_words(tables, files.setting)]
    checked = _read(words)
    if checked.observe.progress == "auto":
        words.append("--observe.progress=none")
    check_folder(checked)
    try:
        files.write()
        return Run(words, checked, folder / "console.log", quiet=quiet)
    except OSError as error:
        raise FolderError(
            f"job.dump_folder must be a folder that this user can make and write, got "
            f"{checked.job.dump_folder}: {error}. Choose another folder."
        ) from error


class Run:
    """A run that was started by :func:`run`.

    Iterating over it yields the metrics of each step while it runs, as in ``metrics.jsonl``. The run stops
    in an orderly way, as after Ctrl-C, when the loop is left (also by an exception), at :meth:`close`, at
    the end of a ``with`` block, and when this object, the thread that started it, or the interpreter ends.
    The end of a process that the script has forked does not stop the run.

    Attributes:
        folder: ``job.dump_folder``, absolute.
    """

    def __init__(self, words: list[str], config: JobConfig, log_file: Path, *, quiet: bool) -> None:
        self._start_folder = Path.cwd()
        self.folder = self._start_folder / config.job.dump_folder
        self._steps = NewRecords(self.folder / "metrics.jsonl")
        self._console = _Console(self._start_folder / log_file, quiet=quiet)
        self._was_closed, self._owner = False, os.getpid()
        self._end_seconds = seconds = config.grpo.stop_timeout_seconds + _MARGIN_SECONDS
        command = [sys.executable, str(_PROGRAM), "train", *words]
        try:
            with _ctrl_c_held_back():  # or what has been started would have no owner
                self._child = start_child(command, log_file=self._console.file)
                self._unless_closed = weakref.finalize(
                    self, _end_forgotten, self._child, seconds, self._owner
                )
        except KeyboardInterrupt:
            self.close()
            raise

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields each step's metrics, with None for those that are null. Raises RunError if the run fails."""
        try:
            has_ended = False
            while not has_ended:
                has_ended = self._wait()  # before the last look at the file
                yield from self._steps.take()
            if not self._was_closed:
                self._raise_if_failed()
        finally:
            self.close()

    def result(self) -> dict[str, Any]:
        """Waits for the end of the run, and returns its summary.

        The summary has the keys of ``summary.json`` and the key ``dump_folder``. Its paths ``dump_folder`` and
        ``hf_checkpoint`` are absolute. Raises RunError if the run failed, or was ended before its last step.
        """
        try:
            while not self._wait():
                pass
        except KeyboardInterrupt:
            self.close()
            raise
        self._raise_if_failed()
        file = self.folder / "summary.json"
        try:
            summary = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise RunFailed(f"{file} must hold the summary of the run, but: {error}") from error
        paths = {"dump_folder": self.folder, "hf_checkpoint": summary["hf_checkpoint"]}
        return summary | {key: str(self._start_folder / path) for key, path in paths.items()}

    def close(self) -> None:
        """Ends the run if it has not ended, with a checkpoint if ``checkpoint.enable`` is set.

        The run has ``grpo.stop_timeout_seconds`` to end, and is then killed. In a forked process, which
        shares the files with its parent, this does nothing.
        """
        if os.getpid() != self._owner:
            return
        self._was_closed = self._was_closed or self._child.poll() is None
        self._end()
        self._console.show()
        self._console.close()
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> bool:
        """Waits a moment, and shows what the run has printed. Returns whether the run has ended."""
        try:
            self._child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            self._console.show()
            return False
        self._end()
        self._console.show()
        return True

    def _end(self) -> None:
        if self._unless_closed.detach():
            _end(self._child, self._end_seconds)

    def _raise_if_failed(self) -> None:
        status = self._child.returncode
        if status == 0 and not self._was_closed:
            return
        reason = "The script ended the run before its last step."
        if not self._was_closed:
            reason = self._console.reason()
        raise RunFailed(
            f"{_in_python(reason)}\nThe run ended with {describe_status(status)}. What it printed is in "
            f"{self._console.file}; the logs of its other processes are in {self.folder}.",
            status,
        )


class _Console:
    """The output of a run, in a file, because a run that prints to a pipe would fail once nobody reads it."""

    def __init__(self, file: Path, *, quiet: bool) -> None:
        self.file = file
        self._quiet = quiet
        file.parent.mkdir(parents=True, exist_ok=True)
        open_log(file).close()
        self._stream = file.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin = self._stream.seek(0, os.SEEK_END)

    def show(self) -> None:
        """Prints what the run has written since the last call, also if its log was truncated meanwhile."""
        if self._quiet or self._stream.closed:
            return
        if os.fstat(self._stream.fileno()).st_size < self._stream.tell():
            self._begin = self._stream.seek(0)
        if text := self._decoder.decode(self._stream.read()):
            print(text, end="", flush=True)

    def reason(self) -> str:
        """Returns the error that the run printed, or its last lines."""
        # The open file may have been removed with its folder.
        with self.file.open("rb") if self._stream.closed else self._stream as stream:
            stream.seek(0)
            content = stream.read()
        begin = self._begin if self._begin <= len(content) else 0
        text = content[begin:].decode(errors="replace").strip()
        if found := re.search(r"^error: ", text, re.MULTILINE):
            return text[found.end() :].partition("\n[titan] ")[0][:_REASON_CHARS]
        return "\n".join(text.splitlines()[-_REASON_LINES:])

    def close(self) -> None:
        self._stream.close()


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block, on the main thread. It never interrupts other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = list[int]()
    handler = signal.signal(signal.SIGINT, lambda signum, _: held.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _end_forgotten(child: subprocess.Popen, seconds: float, owner: int) -> None:
    if os.getpid() != owner:
        return
    if child.poll() is None:
        print(
            "A run is ended, because the script ends or has let go of it. Keep what run() returns: loop over "
            "it, or call its result().",
            file=sys.stderr,
            flush=True,
        )
    _end(child, seconds)


def _end(child: subprocess.Popen, seconds: float) -> None:
    try:
        stop_children([child], seconds)
    except KeyboardInterrupt:  # a second Ctrl-C
        stop_children([child], 0.0)
        raise


def _read(words: list[str]) -> JobConfig:
    with refusing(say=_in_python):
        return read_settings(parse(words))


def _in_python(text: str) -> str:
    """Rewrites advice for the command line as advice for callers of :func:`run`."""
    text = text.replace("--job.config_file", "config").replace("on the command line", "in run()")
    text = re.sub("Unknown (argument|option) --(?=[a-z])", "Unknown setting ", text)
    text = re.sub(r"--gpus \(or --nproc\)|--(nproc|gpus)(?![ =][0-9N]\b|[-_])", "ranks", text)
    text = re.sub("--(?:nproc|gpus)[ =]", "ranks=", text)
    text = text.replace("--job.overwrite", 'job={"overwrite": True}')
    # Of texts, paths and what ends a sentence are values. Other words go on with the sentence.
    word = r"[^\s;,]*/[^\s;,]*[^\s;,.)]|(?!instead|too)[A-Za-z_]\w*(?=[.;,)](?:\s|$))"
    text = re.sub(rf"(--\w+\.[\w.-]+)[ =]({word})", r'\1 "\2"', text)
    option = r"--(\w+)\.([\w-]+(?:\.[\w-]+)*)(?:[ =](-?\d[\w.+-]*\b|\"[^\"]*\"))?"
    return re.sub(option, lambda m: f'{m[1]}={{"{m[2]}": {m[3] or "..."}}}', text)


def _tables(
    config: str | os.PathLike[str] | Tables, reward: RewardSetting | None, settings: Tables
) -> dict[str, dict[str, Any]]:
    """Merges the settings that are given in Python. Those of ``settings`` replace those of ``config``."""
    if isinstance(reward, Mapping):
        settings = {**settings, "reward": reward}
    elif reward is not None:
        functions = list(reward) if isinstance(reward, list | tuple) else [reward]
        settings = {**settings, "reward": {"functions": functions}}
    tables: dict[str, dict[str, Any]] = {}
    for given in (config if isinstance(config, Mapping) else {}, settings):
        for name, table in given.items():
            if not isinstance(table, Mapping):
                raise ConfigError(
                    'Settings are given by table, such as training={"steps": 5}, got '
                    f"{name}={table!r:.80}."
                )
            tables[name] = {**tables.get(name, {}), **table}
    return tables


def _words(tables: Tables, name_of: Callable[[Callable[..., Any]], str]) -> Iterator[str]:
    """Yields settings as words of a command line, with functions by their names."""
    for name, table in tables.items():
        for key, value in table.items():
            plain = "none" if value is None else _plain(value, name_of)
            text = plain if isinstance(plain, str) else toml_value(plain)
            yield f"--{name}.{key}={text}"


def _plain(value: Any, name_of: Callable[[Callable[..., Any]], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner, name_of) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, name_of) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return name_of(value) if callable(value) else value
