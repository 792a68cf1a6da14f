# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Starts a child process: sets its limits and the signal at its parent's end, then executes its command.

    python -I -S child_begin.py PARENT SIGNAL LIMITS COMMAND...

Hooks that run between fork and exec (``preexec_fn``) could set the same. But if another thread of the
parent is just being started or ended, the forked Python waits forever for a lock of that thread, and
the parent waits forever for the child.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, signum, limits, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != int(parent):
        sys.exit(128 + int(signum))  # it has ended before
    # Python ignores them, and so would the program.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    for kind, (soft, hard) in json.loads(limits).items():
        resource.setrlimit(int(kind), (soft, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]!r} cannot be run: {error}")


if __name__ == "__main__":
    main()
