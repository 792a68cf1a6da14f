# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Every interleaving of one lane, its server, the dispatcher and what may go wrong.

The lane's states are those of the real :func:`next_state`; around them are modeled:

    trainer     publishes versions, at any time
    lane        join; [pause] begin, two buckets, commit [resume]; version; and again, a READY
                one resume and version at any time; after a failure leave, resume
    server      holds weights, and a label of what it holds: a version, or none; commits only
                the version of an update that it has whole
    dispatcher  believes what the lane's messages say, which come arbitrarily late
    faults      at every point: stop, kill, an answer that is lost, another trainer, removal

A request to a stopped server is given up by the lane, and still arrives when the server goes
on: in any order with others like it, and before what is sent later or even after that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import pytest

from torchtitan.grpo.weight_sync.lane import LaneEvent, LaneState, next_state

NOTHING, MIXTURE = -1, -2
NUM_BUCKETS = 2
Kind = Literal["transfer", "commit", "nothing"]

_UPDATE = ("begin",) + ("bucket",) * NUM_BUCKETS
_PUSH: dict[Kind, tuple[str, ...]] = {
    "transfer": ("pause", *_UPDATE, "commit", "resume"),
    "commit": (*_UPDATE, "pause", "commit", "resume"),
    "nothing": (*_UPDATE, "commit"),
}
"""Requests of a push, by what the server stops generation for."""


class Server(NamedTuple):
    process: str = "alive"
    held: int = NOTHING  # version whose weights these are; NOTHING: those it was started with
    label: int | None = None  # None: says of its tokens that they are of no version
    is_paused: bool = False
    is_joined: bool = False
    update: tuple[int, int] | None = None  # that is open: buckets received, their version
    late: frozenset[tuple[str, int]] = frozenset()  # requests that nobody waits for


class Lane(NamedTuple):
    state: LaneState = LaneState.JOINING
    at: int = 0  # index of the state's next request
    pushing: int = NOTHING
    version: int = NOTHING  # that the dispatcher was told; NOTHING when told of a loss
    has_cleared_up: bool = False  # the server has answered the last that follows a failure


class System(NamedTuple):
    newest: int = 0
    lane: Lane = Lane()
    server: Server = Server()
    mail: tuple[int, ...] = ()  # versions, NOTHING for a loss
    believed: int = NOTHING
    num_faults: int = 0


class Refused(Exception):
    """The server's answer to what it cannot do."""


@dataclass(frozen=True)
class Model:
    # What the server stops for. Only where that is the whole transfer do buckets go straight
    # into the weights that it serves.
    kind: Kind
    last_version: int  # versions are 0 to this one
    max_faults: int
    # What was given up may arrive after what was sent later. A server may then stand still for a
    # while, so a READY lane lifts the pause whenever it asks for the version.
    late_come_any_time: bool = False
    bug: str = ""  # what is wrong on purpose

    def is_done(self, system: System) -> bool:
        if system.mail or system.newest != self.last_version:
            return False
        if system.lane.state is LaneState.CLOSED:
            return system.believed == NOTHING
        server, newest = system.server, system.newest
        return (
            system.lane.state is LaneState.READY
            and (system.lane.version, system.believed) == (newest, newest)
            and (server.process, server.is_paused) == ("alive", False)
            and (server.held, server.label) == (newest, newest)
        )

    def steps(self, system: System) -> Iterator[tuple[str, System]]:
        self._check(system)
        if system.newest < self.last_version:
            yield "publish", system._replace(newest=system.newest + 1)
        if system.mail:
            told = system._replace(believed=system.mail[0], mail=system.mail[1:])
            yield f"dispatcher is told {system.mail[0]}", told
        yield from self._events(system)
        yield from self._requests(system)
        yield from self._server(system)
        if system.num_faults < self.max_faults:
            for what, following in self._faults(system):
                after = following._replace(num_faults=system.num_faults + 1)
                yield f"fault: {what}", after

    # -- invariants --------------------------------------------------------------------

    def _check(self, system: System) -> None:
        lane, server = system.lane, system.server
        is_writing = server.process == "alive" and not server.is_paused
        if is_writing and server.label is not None:
            assert server.held == server.label, "tokens are labeled with what did not write them"
        if server.label is not None and system.believed != NOTHING:
            assert server.label >= system.believed, "work is sent for a version not served yet"
        is_settled = lane.state is LaneState.READY or lane.has_cleared_up
        if is_settled and not self.late_come_any_time:
            assert not server.is_paused, "the server is left paused"
        if not system.mail:
            assert system.believed == lane.version, "the dispatcher believes what the lane does not"

    # -- lane --------------------------------------------------------------------------

    def _script(self, lane: Lane) -> tuple[str, ...]:
        if lane.state is LaneState.JOINING:
            return ("join",)
        if lane.state is LaneState.SYNCING:
            push = _PUSH[self.kind]
            return push[:-1] if self.bug == "no resume after a push" else push
        if lane.state in (LaneState.LOST, LaneState.CLOSED):
            return ("leave",) if self.bug == "no resume after a failure" else ("leave", "resume")
        if self.bug == "a pause is never looked for" or lane.state is LaneState.ATTESTING:
            return ("version",)
        return ("resume", "version")

    def _events(self, system: System) -> Iterator[tuple[str, System]]:
        """What the lane does of its own accord."""
        lane = system.lane
        if lane.state is LaneState.READY and system.newest > lane.version:
            after = lane._replace(pushing=system.newest)
            yield "newer", _event(system, after, LaneEvent.NEWER_VERSION)
        if lane.state is LaneState.LOST and lane.at == len(self._script(lane)):
            yield "retry", _event(system, lane, LaneEvent.RETRY_DUE)

    def _requests(self, system: System) -> Iterator[tuple[str, System]]:
        lane, server = system.lane, system.server
        script = self._script(lane)
        if lane.at == len(script) or (lane.state is LaneState.READY and self.bug == "no check"):
            return
        request = script[lane.at]
        if server.process == "alive":
            if server.late and not self.late_come_any_time:
                return  # handled first
            try:
                served = self._handle(server, request, lane.pushing)
            except Refused:
                yield f"{request} refused", self._failed(system)
                return
            after = system._replace(server=served)
            yield f"{request} answered", self._answered(after, request)
            if system.num_faults < self.max_faults:
                after = after._replace(num_faults=system.num_faults + 1)
                yield f"fault: answer to {request} lost", self._failed(after)
            return
        if server.process == "stopped":
            server = server._replace(late=server.late | {(request, lane.pushing)})
        yield f"{request} not answered", self._failed(system._replace(server=server))

    def _answered(self, system: System, request: str) -> System:
        lane = system.lane._replace(at=system.lane.at + 1)
        is_last = lane.at == len(self._script(lane))
        after = system._replace(lane=lane)
        if request == "version":
            return self._compared(system)
        if self.bug == "confirms before the commit" and request == "bucket":
            return _told(after, lane.pushing)
        if not is_last:
            return after
        if lane.state is LaneState.JOINING:
            return _event(after, lane._replace(pushing=system.newest), LaneEvent.JOINED)
        if lane.state is LaneState.SYNCING:
            return _event(after, lane, LaneEvent.COMMITTED)
        return system._replace(lane=lane._replace(has_cleared_up=True))

    def _compared(self, system: System) -> System:
        lane = system.lane
        is_ready = lane.state is LaneState.READY
        expected = lane.version if is_ready else lane.pushing
        if system.server.label != expected and self.bug != "no check":
            return self._lost(system, LaneEvent.VERSION_MISMATCH)
        if is_ready:
            return system._replace(lane=lane._replace(at=0))
        return _told(_event(system, lane, LaneEvent.ATTESTED), lane.pushing)

    def _failed(self, system: System) -> System:
        lane = system.lane
        if lane.state in (LaneState.LOST, LaneState.CLOSED):
            # What follows a failure fails, too: noted, and on to the next.
            return system._replace(lane=lane._replace(at=lane.at + 1))
        return self._lost(system, LaneEvent.FAILED)

    def _lost(self, system: System, event: LaneEvent) -> System:
        after = _event(system, system.lane, event)
        if self.bug == "the loss is not told":
            return after._replace(lane=after.lane._replace(version=NOTHING))
        return _told(after, NOTHING)

    # -- server ------------------------------------------------------------------------

    def _handle(self, server: Server, request: str, version: int) -> Server:
        if request == "join":
            return server._replace(is_joined=True)
        if request == "leave":
            return server._replace(is_joined=False, update=None)
        if request in ("pause", "resume"):
            return server._replace(is_paused=request == "pause")
        if request == "begin":
            keeps = self.kind != "transfer" or self.bug == "keeps its label while it is updated"
            return server._replace(update=(0, NOTHING), label=server.label if keeps else None)
        if request == "bucket":
            return self._receive(server, version)
        if request == "commit":
            return self._commit(server, version)
        return server

    def _receive(self, server: Server, version: int) -> Server:
        if not server.is_joined or server.update is None:
            raise Refused
        held = MIXTURE if self.kind == "transfer" else server.held
        return server._replace(update=(server.update[0] + 1, version), held=held)

    def _commit(self, server: Server, version: int) -> Server:
        if self.bug == "commits what was not opened" and server.update is None:
            return server._replace(label=version)
        if server.update is None or server.update[0] != NUM_BUCKETS:
            raise Refused
        if server.update[1] != version and self.bug != "commits whatever is open":
            raise Refused
        return server._replace(held=server.update[1], label=version, update=None)

    def _server(self, system: System) -> Iterator[tuple[str, System]]:
        server = system.server
        if server.process == "dead":
            yield "restarted", system._replace(server=Server())
        elif server.process == "stopped":
            yield "continued", system._replace(server=server._replace(process="alive"))
        for late in server.late if server.process == "alive" else ():
            request, version = late
            rest = server._replace(late=server.late - {late})
            if request == "bucket":  # nobody sends to it any more; a part may have come
                is_hit = self.kind == "transfer" and server.update is not None
                served = rest._replace(held=MIXTURE) if is_hit else rest
            elif request == "join":  # nobody to join
                served = rest
            else:
                try:
                    served = self._handle(rest, request, version)
                except Refused:
                    served = rest
            yield f"late {request} handled", system._replace(server=served)

    def _faults(self, system: System) -> Iterator[tuple[str, System]]:
        server, lane = system.server, system.lane
        if server.process == "alive":
            yield "stopped", system._replace(server=server._replace(process="stopped"))
        if server.process != "dead":
            yield "killed", system._replace(server=Server(process="dead"))
        left = server._replace(is_joined=False)  # the group ends with the trainer
        yield "another trainer", System(system.newest, Lane(), left)
        if lane.state is not LaneState.CLOSED:
            yield "removed", _told(_event(system, lane, LaneEvent.REMOVED), NOTHING)


def _event(system: System, lane: Lane, event: LaneEvent) -> System:
    lane = lane._replace(state=next_state(lane.state, event), at=0, has_cleared_up=False)
    return system._replace(lane=lane)


def _told(system: System, version: int) -> System:
    # The same twice is the same as once; it would make states without end.
    mail = system.mail if system.mail[-1:] == (version,) else (*system.mail, version)
    return system._replace(lane=system.lane._replace(version=version), mail=mail)


@pytest.mark.parametrize("kind", ["nothing", "commit", "transfer"])
@pytest.mark.parametrize(
    ("last_version", "max_faults", "late_come_any_time"),
    [(2, 1, False), (1, 2, False), (1, 1, True)],
)
def test_no_interleaving_breaks_an_invariant_or_gets_stuck(
    kind, last_version, max_faults, late_come_any_time, explore
):
    model = Model(kind, last_version, max_faults, late_come_any_time)
    assert explore(System(), model.steps, is_goal=model.is_done) > 2000


@pytest.mark.parametrize(
    ("kind", "bug", "message", "late_come_any_time"),
    [
        ("commit", "confirms before the commit", "work is sent for a version not served", False),
        ("nothing", "no check", "no goal is in reach", False),
        ("commit", "no resume after a failure", "the server is left paused", False),
        ("transfer", "no resume after a push", "the server is left paused", False),
        ("transfer", "keeps its label while it is updated", "tokens are labeled with what", False),
        ("nothing", "commits what was not opened", "tokens are labeled with what", False),
        ("transfer", "the loss is not told", "believes what the lane does not", False),
        ("nothing", "commits whatever is open", "tokens are labeled with what", True),
        ("commit", "a pause is never looked for", "no goal is in reach", True),
    ],
)
def test_the_exploration_finds_what_is_broken_on_purpose(
    kind, bug, message, late_come_any_time, explore
):
    model = Model(kind, 1, 1, late_come_any_time, bug)
    with pytest.raises(AssertionError, match=message):
        explore(System(), model.steps, is_goal=model.is_done)
