# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The loop that keeps servers busy: prompt -> server -> reward -> finished group.

Consumes prompts; produces batches of groups; waits for room under the staleness bound
(:mod:`.admission`) and on a server (:mod:`.serving.dispatcher`); unblocked by finished groups, new
versions on servers, and batches taken by the trainer. What becomes of each prompt stands in
the ledger (:mod:`.ledger`).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from torchtitan.grpo.rollout.admission import Admission, part_size
from torchtitan.grpo.rollout.joining import as_context
from torchtitan.grpo.rollout.judging import GroupJudge, Unusable
from torchtitan.grpo.rollout.ledger import CloseReason, Ledger
from torchtitan.grpo.rollout.longest_first import LongestFirst
from torchtitan.grpo.rollout.prompts import PromptStream
from torchtitan.grpo.rollout.ranker import LengthRanker
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.rollout.rollout_metrics import RolloutCounts, RolloutMetrics
from torchtitan.grpo.rollout.running_group import RunningGroup
from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup
from torchtitan.grpo.rollout.scoring import prompt_text
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.trajectory import TrajectoryWriter
from torchtitan.grpo.types import BatchPart, Generation, Prompt, RolloutGroup

logger = logging.getLogger(__name__)

OverduePolicy = Literal["wait", "drop", "cut", "resume"]

# A server's pause after a failure ends without an event, so the loop looks again.
_RETRY_SECONDS = 0.2


class Producer:
    """Starts groups, follows each to its reward, and hands out batches.

    Args:
        prompts: Endless.
        admission: The staleness bound.
        dispatcher: The servers.
        judge: Filters and reward functions.
        ledger: What becomes of the prompts; ``prompts`` begins where it is.
        writer: Writes the completions.
        group_size: ``grpo.group_size``.
        num_parts: In how many parts a batch is handed out (``rollout.stream_parts``).
        overdue: ``rollout.overdue``.
        saved: What an earlier process held. Its groups are not among what ``prompts`` hands out.
        ranker: Predicts how long answers are; None starts prompts as they come in.
        window: Prompts among which the longest come first: those of a batch.
    """

    def __init__(
        self,
        prompts: PromptStream,
        admission: Admission,
        dispatcher: Dispatcher,
        judge: GroupJudge,
        ledger: Ledger,
        writer: TrajectoryWriter,
        *,
        group_size: int,
        num_parts: int = 1,
        overdue: OverduePolicy = "wait",
        saved: SavedRollouts | None = None,
        ranker: LengthRanker | None = None,
        window: int = 1,
    ) -> None:
        self._prompts = prompts
        self._admission = admission
        self._dispatcher = dispatcher
        self._judge = judge
        self._ledger = ledger
        self._writer = writer
        self._group_size = group_size
        self._num_parts = num_parts
        self._overdue: OverduePolicy = overdue
        self._ranker = ranker
        predict = ranker.predict if ranker is not None else lambda prompt: 0.0
        self._order = LongestFirst(window, predict, longest_first=ranker is not None)
        self._finished: dict[int, RolloutGroup] = {}
        self._taken: list[RolloutGroup] = []  # of a batch that is not whole yet
        self._unfinished: dict[int, UnfinishedGroup] = {}
        self._resumed: list[tuple[Prompt, tuple[Generation, ...]]] = []  # wait to go on
        self._context: dict[int, tuple[Generation, ...]] = {}  # of those about to
        self._running: dict[int, RunningGroup] = {}
        self._counts = RolloutCounts()
        self._metrics = RolloutMetrics()
        self._room = asyncio.Event()
        self._group_done = asyncio.Event()
        dispatcher.listeners.append(self._room.set)
        if saved is not None:
            self._restore(saved)

    def _restore(self, saved: SavedRollouts) -> None:
        """Opens what was open, before anything new: the staleness bound held for all of it."""
        for group in saved.finished:
            oldest = min(rollout.oldest_version for rollout in group.rollouts)
            self._ledger.issue(group.group_id)
            self._admission.start(group.group_id, oldest)
            self._admission.finish(group.group_id, oldest)
            self._finished[group.group_id] = group
        for unfinished in saved.unfinished:
            self._ledger.issue(unfinished.group_id)
            self._admission.start(unfinished.group_id, unfinished.start_version)
            self._unfinished[unfinished.group_id] = unfinished

    def save(self) -> SavedRollouts:
        """All that is held now, for a checkpoint."""
        unfinished = dict(self._unfinished)  # what was restored, and has not been gone on with
        for group_id, running in self._running.items():
            done, begun = running.done(), running.begun()
            if done or begun:
                start = self._admission.start_version(group_id)
                unfinished[group_id] = UnfinishedGroup(group_id, start, done, begun)
        return SavedRollouts(
            version=self._admission.next_batch,
            progress=self._ledger.progress,
            closed=self._ledger.closed,
            finished=tuple(self._finished[i] for i in sorted(self._finished)),
            unfinished=tuple(unfinished[i] for i in sorted(unfinished)),
        )

    async def run(self) -> None:
        """Starts groups for ever.

        Raises:
            ValueError: A prompt is bad.
            ServersFailing, RewardError: The run must stop.
        """
        async with asyncio.TaskGroup() as groups:
            await self._go_on_with_unfinished(groups)
            while True:
                prompt = await self._next_prompt()
                server = await self._wait_for_server(
                    lambda version: self._admission.may_start(version, self._dispatcher.in_flight)
                )
                self._start_group(prompt, server, groups)

    async def _go_on_with_unfinished(self, groups: asyncio.TaskGroup) -> None:
        """Before anything new: that may have to wait for a batch, and a batch for these."""
        starts = {i: self._admission.start_version(i) for i in self._unfinished}
        for group_id in sorted(starts, key=lambda i: (starts[i], i)):
            prompt = await asyncio.to_thread(self._prompts.prompt_at, group_id)
            start = starts[group_id]
            server = await self._wait_for_server(lambda version: version >= start)  # noqa: B023
            self._start_group(prompt, server, groups)
            self._group_done.set()  # what is overdue can be relieved from now on

    async def batch(self, version: int) -> RolloutBatch:
        """Waits for the groups that turn ``version`` into ``version + 1``.

        With ``num_parts`` above 1 each call waits for a part of them alone.

        Raises:
            RuntimeError: It is not this version's turn.
        """
        if version != self._admission.next_batch:
            raise RuntimeError(
                f"The trainer asked for the batch of version {version}, and the next batch here "
                f"is {self._admission.next_batch}: they are out of step."
            )
        begins_batch = not self._taken
        group_ids = await (self._take_part() if self._num_parts > 1 else self._take_batch())
        self._room.set()
        # By id, so that a synchronous run is the same run each time.
        groups = [self._finished.pop(group_id) for group_id in sorted(group_ids)]
        self._taken += groups
        if self._admission.next_batch == version:
            part = BatchPart.at(begins_batch=begins_batch, ends_batch=False)
            return RolloutBatch(groups, self._ledger.progress, {}, {}, part)
        batch, self._taken = self._taken, []
        self._judge.next_batch()
        self._ledger.train([group.group_id for group in batch])
        metrics = self._batch_metrics(batch)
        progress, closed = self._ledger.progress, self._ledger.take_closed()
        part = BatchPart.at(begins_batch=begins_batch, ends_batch=True)
        return RolloutBatch(groups, progress, closed, metrics, part)

    async def _take_batch(self) -> list[int]:
        while (group_ids := self._admission.take_batch()) is None:
            await self._wait_for_group()
        return group_ids

    async def _take_part(self) -> list[int]:
        """A part's groups, as soon as there are so many; less where the batch ends with them."""
        batch = self._admission.next_batch
        size = part_size(self._admission.groups_per_batch, self._num_parts)
        part: list[int] = []
        while len(part) < size and self._admission.next_batch == batch:
            group_id = self._admission.take_next()
            if group_id is None:
                await self._wait_for_group()
            else:
                part.append(group_id)
                self._room.set()
        return part

    async def _wait_for_group(self) -> None:
        self._group_done.clear()
        if not self._relieve_overdue():
            await self._group_done.wait()

    def describe(self) -> str:
        """What a batch that is being waited for still lacks."""
        servers = self._dispatcher.servers.values()
        ready = sum(server.is_ready() for server in servers)
        text = f"{self._admission.describe()}; {ready} of {len(servers)} servers ready"
        if self._dispatcher.last_error:
            text += f"; last server error: {self._dispatcher.last_error}"
        return text

    async def _next_prompt(self) -> Prompt:
        if self._resumed:
            prompt, self._context[prompt.index] = self._resumed.pop(0)
            return prompt
        while (prompt := self._order.pop()) is None:
            # Tokenising, and passing over long prompts, must not hold up the loop.
            drawn = await asyncio.to_thread(self._prompts.next)
            self._ledger.issue(drawn.index)
            self._order.push(drawn)
        return prompt

    async def _wait_for_server(self, usable: Callable[[int], bool]) -> Server:
        """A server of a version that will do."""
        while True:
            self._room.clear()
            server = self._dispatcher.choose(usable)
            if server is not None:
                return server
            try:
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                pass

    def _start_group(self, prompt: Prompt, server: Server, groups: asyncio.TaskGroup) -> None:
        assert server.version is not None, f"{server.url} is not ready"
        unfinished = self._unfinished.pop(prompt.index, None)
        if unfinished is None:
            self._admission.start(prompt.index, server.version)
        kept = unfinished.generations[: self._group_size] if unfinished is not None else ()
        context = self._context.pop(prompt.index, ())
        begun = unfinished.begun if unfinished is not None else context
        expected_tokens = self._ranker.predict(prompt) if self._ranker is not None else None
        # Started here and not in the task below: they must count as in flight at once.
        trajectories = [
            self._writer.start(
                prompt,
                server,
                begun=begun[i] if i < len(begun) else None,
                expected_tokens=expected_tokens,
            )
            for i in range(self._group_size - len(kept))
        ]
        running = self._running[prompt.index] = RunningGroup(prompt, trajectories, kept)
        running.task = groups.create_task(self._follow_group(running, server))

    async def _follow_group(self, running: RunningGroup, server: Server) -> None:
        prompt = running.prompt
        try:
            await asyncio.gather(*(t.until_ended() for t in running.trajectories))
            # From here on nobody gives the group up: it is about to be finished.
            running.task = None
            completions = running.done()
            is_cut = any(trajectory.is_cut for trajectory in running.trajectories)
            if self._ranker is not None and completions and not is_cut:
                self._ranker.observe(prompt, [len(c.token_ids) for c in completions])
            rollouts = await self._judge.judge(prompt, completions)
        except Unusable as verdict:
            # Not the servers' fault where it was cut before there was anything to keep.
            is_early = is_cut and verdict.reason == "failed"
            self._close(prompt.index, "overdue" if is_early else verdict.reason)
        else:
            self._finish(
                RolloutGroup(prompt.index, prompt_text(prompt), tuple(rollouts), server.url)
            )
        del self._running[prompt.index]
        self._group_done.set()
        self._room.set()

    def _close(self, group_id: int, reason: CloseReason) -> None:
        self._admission.close(group_id)
        self._ledger.close(group_id, reason)
        self._counts.closed[reason] += 1

    def _relieve_overdue(self) -> bool:
        """Does as ``rollout.overdue`` says with what the next batch would have to wait for.

        Returns:
            Whether it need not be waited for any more.
        """
        if self._overdue == "wait":
            return False
        made_room = False
        for group_id in self._admission.overdue():
            running = self._running.get(group_id)
            if running is None or running.task is None:
                continue  # it is about to be finished, or to be gone on with
            if self._overdue == "cut":
                self._counts.cut += running.cut()
                continue
            begun = running.begun()
            running.cancel()
            del self._running[group_id]
            made_room = True
            if self._overdue == "drop":
                self._close(group_id, "overdue")
            else:
                # For the ledger it stays open; its deadline will count from its next start.
                self._admission.close(group_id)
                self._resumed.append((running.prompt, tuple(map(as_context, begun))))
                self._counts.resumed += 1
        return made_room

    def _finish(self, group: RolloutGroup) -> None:
        oldest = min(rollout.oldest_version for rollout in group.rollouts)
        if self._admission.finish(group.group_id, oldest):
            self._finished[group.group_id] = group
            return
        self._ledger.close(group.group_id, "expired")
        self._counts.closed["expired"] += 1
        logger.warning(
            "Group %d holds tokens of version %d, older than %s was attested to serve when the "
            "group was started; the group is dropped.",
            group.group_id,
            oldest,
            group.server_url,
        )

    def _batch_metrics(self, groups: list[RolloutGroup]) -> dict[str, float]:
        self._counts.failed_requests = self._dispatcher.num_failed_requests
        self._counts.tokens = self._dispatcher.num_tokens
        self._counts.closed["too long"] = self._prompts.num_too_long
        metrics = self._metrics.of_batch(
            groups,
            self._counts,
            buffered=len(self._finished),
            in_flight=self._dispatcher.in_flight,
        )
        return metrics | self._writer.metrics() | self._dispatcher.metrics()
