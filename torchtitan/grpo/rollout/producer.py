# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Keeps the servers busy and turns prompts into batches of finished groups.

The loop waits for room under the staleness bound (:mod:`.admission`) and for a server. It is
unblocked by finished groups, new versions on servers, and batches that the trainer takes.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from torchtitan.grpo.config import GRPO, Rollout
from torchtitan.grpo.rollout.admission import Admission, part_size
from torchtitan.grpo.rollout.drops import DropLog
from torchtitan.grpo.rollout.judging import GroupJudge, Unusable
from torchtitan.grpo.rollout.kept_groups import EXPIRED, OVERDUE, Cause, KeptGroups
from torchtitan.grpo.rollout.ledger import CloseReason, Ledger
from torchtitan.grpo.rollout.longest_first import LengthRanker, LongestFirst
from torchtitan.grpo.rollout.prompts import PromptStream
from torchtitan.grpo.rollout.results import RolloutBatch
from torchtitan.grpo.rollout.rollout_metrics import RolloutMetrics, with_environment
from torchtitan.grpo.rollout.saved import SavedRollouts, UnfinishedGroup
from torchtitan.grpo.rollout.scoring import brief_columns, prompt_text
from torchtitan.grpo.rollout.serving.dispatcher import Dispatcher, Server
from torchtitan.grpo.rollout.trajectory import CompletionWriter, RunningGroup
from torchtitan.grpo.rollout.waits import RolloutWaits
from torchtitan.grpo.system import spans
from torchtitan.grpo.system.waits import wait_at_most
from torchtitan.grpo.types import CAUSES, BatchPart, Generation, Prompt, RolloutGroup, as_context

# No event marks the end of a server's pause after a failure, so the loop polls as well.
_RETRY_SECONDS = 0.2


class Producer:
    """Starts groups, follows each one until it has rewards, and delivers batches.

    The ledger must start at the position of ``prompts``, which must not return the prompts of groups in
    ``saved`` again. ``writers`` has a writer for each environment's name. ``finished`` holds the groups
    that wait for their batch.
    """

    def __init__(
        self,
        prompts: PromptStream,
        admission: Admission,
        dispatcher: Dispatcher,
        judge: GroupJudge,
        ledger: Ledger,
        writers: Mapping[str, CompletionWriter],
        grpo: GRPO,
        rollout: Rollout,
        *,
        saved: SavedRollouts | None = None,
        drops: DropLog | None = None,
        ranker: LengthRanker | None = None,
    ) -> None:
        self._prompts = prompts
        self._admission = admission
        self._dispatcher = dispatcher
        self._judge = judge
        self._ledger = ledger
        self._writers = dict(writers)
        self._drops = drops or DropLog()
        self._group_size = grpo.group_size
        self._num_parts = rollout.stream_parts if rollout.stream else 1
        self._overdue = rollout.overdue
        self._ranker = ranker
        self._order = LongestFirst(grpo.prompts_per_step, ranker.predict if ranker else None)
        self.finished: dict[int, RolloutGroup] = {}
        self._taken: list[RolloutGroup] = []  # earlier parts of an incomplete batch
        self._delivered: RolloutBatch | None = None  # the last whole batch, perhaps not trained
        self._unfinished: dict[int, UnfinishedGroup] = {}
        # Cancelled groups, to be restarted with these tokens as context.
        self._resumed: list[tuple[Prompt, tuple[Generation, ...]]] = []
        self._context: dict[int, tuple[Generation, ...]] = {}  # of those being restarted
        self._running: dict[int, RunningGroup] = {}
        self._skipped: dict[int, CloseReason] = {}  # since a prompt was issued last
        self._num_resumed = 0
        self._metrics = RolloutMetrics(prompts.file_names)
        self.waits = RolloutWaits(admission, dispatcher, judge)
        self._kept_groups = KeptGroups(admission.groups_per_batch)
        self.is_asked = False  # the trainer waits for a batch
        self._room = asyncio.Event()
        self._group_done = asyncio.Event()
        dispatcher.listeners.append(self._room.set)
        if saved is not None:
            self._restore(saved)

    def _restore(self, saved: SavedRollouts) -> None:
        """Opens the restored groups before any new group, so that the staleness bound counts them."""
        for group in saved.finished:
            oldest = min(rollout.oldest_version for rollout in group.rollouts)
            self._ledger.issue(group.group_id)
            self._admission.start(group.group_id, oldest)
            self._admission.finish(group.group_id, oldest)
            self.finished[group.group_id] = group
        for unfinished in saved.unfinished:
            self._ledger.issue(unfinished.group_id)
            self._admission.start(unfinished.group_id, unfinished.start_version)
            self._unfinished[unfinished.group_id] = unfinished

    @property
    def generating(self) -> set[int]:
        """The open groups that still need completions."""
        running = (i for i, group in self._running.items() if group.task is not None)
        return {*running, *self._unfinished}

    def save(self, version: int) -> SavedRollouts:
        """Returns everything that is not trained on, for the checkpoint of ``version``.

        This includes a delivered batch if the trainer was stopped before it trained on it.
        """
        unfinished = dict(self._unfinished)  # restored groups that have not continued yet
        for group_id, running in self._running.items():
            done, begun = running.done(), running.begun()
            if done or begun:
                start = self._admission.start_version(group_id)
                unfinished[group_id] = UnfinishedGroup(group_id, start, done, begun)
        finished = self.finished | {group.group_id: group for group in self._taken}
        progress, closed = self._ledger.progress, dict(self._ledger.closed)
        if version < self._admission.next_batch and self._delivered is not None:
            untrained = {group.group_id: group for group in self._delivered.groups}
            finished |= untrained
            progress = replace(progress, open=tuple(sorted({*progress.open, *untrained})))
            closed = self._delivered.closed | closed
        return SavedRollouts(
            version=version,
            progress=progress,
            closed=closed,
            finished=tuple(finished[i] for i in sorted(finished)),
            unfinished=tuple(unfinished[i] for i in sorted(unfinished)),
        )

    async def run(self) -> None:
        """Starts groups forever. An error of servers, rewards, teachers or prompts ends the run."""
        async with asyncio.TaskGroup() as groups:
            await self._continue_unfinished(groups)
            while True:
                prompt = await self._next_prompt()
                server = await self._wait_for_server(
                    lambda version: self._admission.may_start(version, self._dispatcher.in_flight)
                )
                self._start_group(prompt, server, groups)

    async def _continue_unfinished(self, groups: asyncio.TaskGroup) -> None:
        """Continues restored groups first: new groups might wait for a batch that waits for these."""
        starts = {i: self._admission.start_version(i) for i in self._unfinished}
        for group_id in sorted(starts, key=lambda i: (starts[i], i)):
            prompt = await asyncio.to_thread(self._prompts.prompt_at, group_id)
            start = starts[group_id]
            server = await self._wait_for_server(lambda version: version >= start)  # noqa: B023
            self._start_group(prompt, server, groups)
            self._group_done.set()  # an overdue group can be relieved once it runs

    async def batch(self, version: int) -> RolloutBatch:
        """Waits for the batch, or its next part, that turns ``version`` into ``version + 1``."""
        if version != self._admission.next_batch:
            raise RuntimeError(
                f"The trainer asked for the batch of version {version}, but the next batch of the "
                f"rollout process is {self._admission.next_batch}. The two must be equal: they "
                "are out of step."
            )
        begins_batch = not self._taken
        self.is_asked = True
        self._note_waits()
        try:
            with spans.span("batches", "trainer waits", step=version + 1):
                group_ids = await (self._take_part() if self._num_parts > 1 else self._take_batch())
        finally:
            self.is_asked = False
        self._note_waits()
        self._room.set()
        # Sorted by ID, so that a synchronous run is reproducible.
        groups = [self.finished.pop(group_id) for group_id in sorted(group_ids)]
        self._taken += groups
        if self._admission.next_batch == version:
            part = BatchPart.at(begins_batch=begins_batch, ends_batch=False)
            return RolloutBatch(groups, self._ledger.progress, {}, {}, part)
        batch, self._taken = self._taken, []
        self._judge.next_batch()
        self._ledger.train([group.group_id for group in batch])
        metrics = self._batch_metrics(batch)
        progress, closed = self._ledger.progress, self._ledger.take_closed()
        rows = {index: self._prompts.row_of(index) for index in closed}
        self._delivered = RolloutBatch(batch, progress, closed, {}, BatchPart.WHOLE)
        part = BatchPart.at(begins_batch=begins_batch, ends_batch=True)
        return RolloutBatch(groups, progress, closed, metrics, part, rows)

    async def _take_batch(self) -> list[int]:
        while (group_ids := self._admission.take_batch()) is None:
            await self._wait_for_group()
        return group_ids

    async def _take_part(self) -> list[int]:
        """Takes the groups of one part as soon as enough of them are finished."""
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

    def _awaited(self) -> list[RunningGroup]:
        """The running groups that the next batch waits for, taken to be those that were started first."""
        return list(itertools.islice(self._running.values(), self._admission.num_missing))

    def progress(self) -> tuple[int, int, int]:
        """The numbers of completions that the next batch has and needs, and of tokens generated so far."""
        wanted = self._admission.groups_per_batch * self._group_size
        num_missing = self._admission.num_missing
        done = wanted - num_missing * self._group_size
        done += sum(len(group.done()) for group in self._awaited())
        return done, wanted, self._dispatcher.attempts.num_tokens

    def describe(self) -> str:
        servers = self._dispatcher.servers.values()
        ready = sum(server.is_ready() for server in servers)
        text = f"{self._admission.describe()}; {ready} of {len(servers)} servers ready"
        if error := self._dispatcher.attempts.last_error:
            text += f"; last server error: {error}"
        return "; ".join(filter(None, [text, self._judge.describe(), self._kept_groups.describe()]))

    async def _next_prompt(self) -> Prompt:
        if self._resumed:
            prompt, self._context[prompt.group_id] = self._resumed.pop(0)
            return prompt
        while (prompt := self._order.pop()) is None:
            # In a thread, because tokenizing and skipping long prompts must not block the loop.
            drawn = await asyncio.to_thread(self._prompts.next)
            self.count_prompts()
            self._ledger.issue(drawn.group_id, self._skipped)
            self._skipped.clear()
            self._order.push(drawn)
        return prompt

    async def _wait_for_server(self, usable: Callable[[int], bool]) -> Server:
        while True:
            self._room.clear()
            server = self._dispatcher.choose(usable)
            self._note_waits()
            if server is not None:
                return server
            await wait_at_most(_RETRY_SECONDS, self._room)

    def _note_waits(self) -> None:
        self.waits.note(self._awaited() if self.is_asked else None)

    def _start_group(self, prompt: Prompt, server: Server, groups: asyncio.TaskGroup) -> None:
        assert server.version is not None, f"{server.url} is not ready"
        unfinished = self._unfinished.pop(prompt.group_id, None)
        if unfinished is None:
            self._admission.start(prompt.group_id, server.version)
        kept = unfinished.generations[: self._group_size] if unfinished is not None else ()
        context = self._context.pop(prompt.group_id, ())
        begun = unfinished.begun if unfinished is not None else context
        expected_tokens = self._ranker.predict(prompt) if self._ranker is not None else None
        writer = self._writers[self._prompts.environment_of(prompt.group_id)]
        # Started here and not in the task below, so that they count as in flight immediately.
        trajectories = [
            writer.start(
                prompt,
                server,
                sample=len(kept) + i,
                begun=begun[i] if i < len(begun) else None,
                expected_tokens=expected_tokens,
            )
            for i in range(self._group_size - len(kept))
        ]
        self._kept_groups.start(prompt.group_id)
        running = self._running[prompt.group_id] = RunningGroup(prompt, trajectories, kept)
        running.task = groups.create_task(self._follow_group(running, server))

    async def _follow_group(self, running: RunningGroup, server: Server) -> None:
        prompt = running.prompt
        try:
            await asyncio.gather(*(t.until_ended() for t in running.trajectories))
            # From here on the group is about to be finished, and must not be cancelled.
            running.task = None
            self._note_waits()
            completions = running.done()
            if self._ranker is not None and completions:
                self._ranker.observe(prompt, [len(c.token_ids) for c in completions])
            environment = self._prompts.environment_of(prompt.group_id)
            judged = prompt, completions, environment, running.failures(), running.judged.extend
            rollouts = await self._judge.judge(*judged)
        except Unusable as verdict:
            self._drops.log_unscored(prompt, running.judged)
            self._close(prompt.group_id, verdict.reason, str(verdict), verdict.cause)
        else:
            used = {id(r.token_ids) for r in rollouts}  # a rated rollout is new, its arrays are not
            self._finish(
                RolloutGroup(
                    prompt.group_id, prompt_text(prompt), tuple(rollouts), server.url,
                    columns=brief_columns(prompt.columns),
                    is_chat=not isinstance(prompt.text, str),
                    file=self._prompts.file_of(prompt.group_id),
                    row=prompt.row,
                    left_out=tuple(r for r in running.judged if id(r.token_ids) not in used),
                )
            )  # fmt: skip
        del self._running[prompt.group_id]
        self._group_done.set()
        self._room.set()

    def _close(self, group_id: int, reason: CloseReason, detail: str, cause: Cause) -> None:
        self._admission.close(group_id)
        self._note_closed(group_id, reason, detail, cause)

    def _note_closed(self, group_id: int, reason: CloseReason, detail: str, cause: Cause) -> None:
        self._ledger.close(group_id, reason)
        of = self._prompts.environment_of(group_id), self._prompts.row_of(group_id)
        self._drops.record_closed(group_id, reason, detail, *of)
        self._kept_groups.drop(group_id, cause)

    def _relieve_overdue(self) -> bool:
        """Drops or restarts overdue groups if ``rollout.overdue`` says so. Returns whether there were any."""
        if self._overdue == "wait":
            return False
        made_room = False
        for group_id in self._admission.overdue():
            running = self._running.get(group_id)
            if running is None or running.task is None:
                continue  # it is about to be finished or to be restarted
            begun = running.begun()
            running.cancel()
            del self._running[group_id]
            made_room = True
            if self._overdue == "drop":
                self._close(
                    group_id,
                    "overdue",
                    'Its batch did not wait (rollout.overdue = "drop").',
                    OVERDUE,
                )
            else:
                # The prompt stays open in the ledger. Its new deadline counts from its restart.
                self._admission.close(group_id)
                self._resumed.append((running.prompt, tuple(map(as_context, begun))))
                self._num_resumed += 1
        return made_room

    def _finish(self, group: RolloutGroup) -> None:
        oldest = min(rollout.oldest_version for rollout in group.rollouts)
        if self._admission.finish(group.group_id, oldest):
            self.finished[group.group_id] = group
            self._kept_groups.keep(group.group_id)
            return
        self._note_closed(
            group.group_id,
            "expired",
            f"It contains tokens of version {oldest}, which is older than the version that "
            f"{group.server_url} was attested to serve when the group started.",
            EXPIRED,
        )

    def count_prompts(self) -> None:
        """Records the prompts that the stream has left out since the last call."""
        for skipped in self._prompts.take_skipped():
            self._skipped[skipped.index] = skipped.reason
            self._drops.record(skipped.reason, skipped.detail, source=skipped.path)

    def _batch_metrics(self, groups: list[RolloutGroup]) -> dict[str, float]:
        self.count_prompts()
        attempts = self._dispatcher.attempts
        counts = {
            "rollout/failed_requests": attempts.num_failed,
            "rollout/resumed_groups": self._num_resumed,
            "rollout/equal_groups_dropped": self._judge.num_equal_dropped,
        }
        metrics = self._metrics.of_batch(groups, attempts.num_tokens, counts)
        metrics["rollout/buffer_groups"] = float(len(self.finished))
        metrics["rollout/inflight_rollouts"] = float(self._dispatcher.in_flight)
        judged = self._judge.take_metrics()
        judge_seconds = metrics.get("reward/logged/judge_seconds", 0.0)
        metrics |= self.waits.take(
            mostly_judge=judge_seconds > 0.5 * judged["rollout/scoring_seconds"]
        )
        self._drops.counts.update({cause: int(judged[metric]) for cause, metric in CAUSES.items()})
        metrics |= judged | self._drops.take_metrics()
        for name, writer in self._writers.items():
            metrics |= with_environment(name, writer.metrics())
        return metrics | self._dispatcher.metrics() | self._dispatcher.take_shares()
