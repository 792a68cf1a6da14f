# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The source of live steps lends devices to a rollout process that may be killed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bare_process import BARE, LENDING, run_instead

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.controller import RolloutController
from torchtitan.grpo.data.planner import PlannedPart
from torchtitan.grpo.inference.access import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from torchtitan.grpo.models.hf_config import read_hf_model
from torchtitan.grpo.training.loan import Loan
from torchtitan.grpo.types import PromptProgress

# The first process does not ask: the devices are free from the start. It dies at the next batch, and
# the one that follows it does not ask for that batch, but for the one after it.
ASK = """
        if self._config.incarnation == 0 and version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if version == 4:
            await self.devices.want(version)
"""


def test_a_killed_process_finds_the_devices_free_when_it_starts_again(
    repository: Path, tmp_path: Path, monkeypatch
):
    run_instead(
        "import os\nimport signal\n" + BARE + LENDING.replace("        ASK", ASK),
        tmp_path,
        monkeypatch,
    )
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE):  # it sets what is not set
        monkeypatch.setenv(variable, "key-of-this-test")
    config = JobConfig()
    config.model.hf_assets_path = str(repository / "assets/reverse_digits/model")
    config.job.dump_folder = str(tmp_path / "run")
    config.inference.launch = config.inference.lend = True
    calls: list[Any] = []
    feed: Any = SimpleNamespace(send_signal=lambda signal: None, all_reduce_sum=lambda x: x, rank=0)
    room: Any = SimpleNamespace(
        give=lambda: calls.append("room") or 0, reclaim=lambda: calls.append("reclaim")
    )
    loan = Loan(feed, room)
    loan.before_wait(0)  # nothing is told before there is a process
    source = RolloutController(
        config,
        read_hf_model(config.model.hf_assets_path),
        start_version=0,
        progress=PromptProgress(),
        date="",
        should_stop=lambda: False,
        loan=loan,
    )
    plan: Any = None
    source._planner = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        plan=lambda *_, **__: PlannedPart(plan, {}), groups=[], advantages={}, trained={}
    )
    restart, notify = source.link.restart, source.link.notify_devices_free
    monkeypatch.setattr(
        source.link, "notify_devices_free", lambda v: (calls.append(f"free {v}"), notify(v))
    )
    monkeypatch.setattr(source.link, "restart", lambda c: (calls.append("restart"), restart(c)))
    try:
        source.start()
        for version in (0, 2, 4):
            calls.append(version)
            assert source.next_step(version, num_ranks=1) is not None
            loan.on_batch()
        assert calls == [
            "room", "free 0", 0, "reclaim", 2, "room", "restart", "free 2", "reclaim",
            4, "room", "free 4", "reclaim",
        ]  # fmt: skip
    finally:
        source.close()
