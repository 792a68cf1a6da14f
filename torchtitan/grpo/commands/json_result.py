# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""``--json`` of a command: one JSON object on standard output, and all else on standard error."""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torchtitan.grpo.system.strict_json import Found, dumps

JSON_FLAG = "--json"
_KEY = re.compile(r"(?<![\w/.])(?:--)?([a-z_]\w*(?:\.\w+)+)")
_NAMED = ("environments.", "cluster.", "evaluation.sets.")  # tables that the user names
_UNKNOWN = re.compile(r"Unknown (?:key|argument) (?:--)?([\w.-]+\w)")


class Parser(argparse.ArgumentParser):
    """Refuses a command line as argparse does, and leaves the reason as a note for ``--json``."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except SystemExit as end:
            end.add_note(message)
            raise


@contextmanager
def json_object(command: str) -> Iterator[Found]:
    """Prints the yielded dict at the end; what else is printed, by child processes too, goes to stderr."""
    found: Found = {"ok": False, "command": command}
    elsewhere = 2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(elsewhere, 1)
    try:
        yield found
    except BaseException as error:
        notes = getattr(error, "__notes__", None)
        found["error"] = notes[0] if notes else f"{type(error).__name__}: {error}"
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        found["problems"] = problems(found.get("error", ""))
        print(dumps(found, default=str), flush=True)


def problems(error: str) -> list[Found]:
    """Returns the problems of an error's text, one for each line that is not indented, with their settings."""
    from torchtitan.grpo.config.command_line.keys import all_keys
    from torchtitan.grpo.config.job_config import JobConfig

    known, found = all_keys(JobConfig), []
    for text in re.split(r"\n(?!\s)", error) if error else ():
        keys = [key for key in _KEY.findall(text) if key in known or key.startswith(_NAMED)]
        keys = dict.fromkeys([*_UNKNOWN.findall(text), *keys])
        found.append({"keys": list(keys), "text": text})
    return found
