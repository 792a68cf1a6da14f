# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Runs the training ranks on this machine under torchrun's agent, in this process.

The rendezvous's store listens on loopback. The agent's own report, thirty lines, is not printed.
"""

import logging
import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchtitan.grpo.start import local_rendezvous
from torchtitan.grpo.system.cores import share_cores
from torchtitan.grpo.system.errors import FINAL_STATUSES
from torchtitan.grpo.system.light_start import LIGHT_PYTHON
from torchtitan.grpo.system.private_folders import make_private_folder, remove_private_folder
from torchtitan.grpo.system.rank_status import REPORTED_FILE, STATUS_FILE, read_status
from torchtitan.grpo.system.stop import stop_signals
from torchtitan_grpo import end_at_start

# Added to the time that ranks have to end, since they report and close after it.
_MARGIN_SECONDS = 10
# The agent insists on handling a signal; `_pass_on_signals` handles the real ones.
_UNUSED_SIGNAL = "SIGQUIT"
# As `-m` would run it, but from the start on Ctrl-C ends a rank without a traceback.
_RANK = "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
# Without all that torchtitan imports for other uses.
_RANK += f"runpy.run_path({LIGHT_PYTHON[1]!r})['install_bare_package'](); "
_RANK += "runpy.run_module('torchtitan.grpo_train', run_name='__main__', alter_sys=True)"


class _Agent(LocalElasticAgent):
    """An agent that restarts no ranks once one has ended with a status in `FINAL_STATUSES`.

    Restarts would not help: the user must look at a run that a guard stopped, and a full disk stays full.
    """

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        statuses = {failure.exitcode for failure in result.failures.values()}
        if result.state is WorkerState.FAILED and statuses & {*FINAL_STATUSES}:
            self._remaining_restarts = 0
        return result


def run_ranks(
    arguments: list[str], num_ranks: int, stop_timeout_seconds: float, max_restarts: int = 0
) -> int:
    """Runs ``torchtitan.grpo_train``. Returns 0, a failed rank's status, or 128 plus a signal's number.

    The first stop signal is passed on to the ranks, which end in an orderly way within
    ``stop_timeout_seconds``. After a failure, all ranks are started again, up to ``max_restarts`` times.
    """
    local_rendezvous.register()
    return run_agent(
        arguments,
        stop_timeout_seconds,
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend=local_rendezvous.BACKEND,
        max_restarts=max_restarts,
    )


def run_agent(arguments: list[str], stop_timeout_seconds: float, **launch: Any) -> int:
    """Runs this node's ranks as torch's ``LaunchConfig`` describes; see :func:`run_ranks`."""
    logging.disable(logging.CRITICAL)  # the agent's, only in this process
    folder = make_private_folder("ranks")
    specs = DefaultLogsSpecs(log_dir=str(folder))
    config = LaunchConfig(**launch, logs_specs=specs, signals_to_handle=_UNUSED_SIGNAL)
    share_cores(config.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # where there are GPUs
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(stop_timeout_seconds) + _MARGIN_SECONDS)
    _pass_on_signals()
    upstream, api.LocalElasticAgent = api.LocalElasticAgent, _Agent
    try:
        # With -P, no file of the current folder, such as a random.py, shadows a module.
        elastic_launch(config, sys.executable)("-u", "-P", "-c", _RANK, *arguments)
    except SignalException as error:
        if not any(folder.glob(f"*/attempt_*/*/{STATUS_FILE}")):  # else a rank tells it
            remove_private_folder(folder)
            end_at_start(error.sigval)
        return 128 + error.sigval
    except ChildFailedError as error:
        return _status_of(error, folder)
    finally:
        api.LocalElasticAgent = upstream
        remove_private_folder(folder)
    return 0


def _pass_on_signals() -> None:
    """Makes the first signal raise the exception on which the agent ends the ranks."""
    handled = stop_signals()

    def handle(signum: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        # To rank 0, SIGHUP may mean something else (inference.urls_file).
        name = signal.Signals(signum if signum == signal.SIGINT else signal.SIGTERM)
        raise SignalException(f"{name.name} received", sigval=name)

    for signum in handled:
        signal.signal(signum, handle)


def _status_of(error: ChildFailedError, folder: Path) -> int:
    """Returns the exit status of the first failed rank, and reports that rank if a signal ended it."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    attempts = folder.glob("*/attempt_*")
    attempt = max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")), default=None)
    if attempt is None or not (attempt / REPORTED_FILE).exists():
        name = signal.Signals(-failure.exitcode).name
        cause = (
            " The kernel ends processes so if the memory is used up." if name == "SIGKILL" else ""
        )
        status = None if attempt is None else read_status(attempt / str(failure.local_rank))
        where = "" if status is None else f" {status.describe()}"
        print(
            f"error: Training rank {rank} on {socket.gethostname()} (process {failure.pid}) was "
            f"ended by {name}{where}.{cause}",
            file=sys.stderr,
            flush=True,
        )
    return 128 - failure.exitcode
