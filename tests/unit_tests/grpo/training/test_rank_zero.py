"""Rank 0 works alone, and the other ranks learn how its work ended."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan.grpo.config.job_config import JobConfig
from torchtitan.grpo.data.feed import Signal
from torchtitan.grpo.training.ranks import RankZeroTurn, patience_seconds


class RecordingFeed:
    """Keeps the signals that rank 0 sends; other ranks receive ``answer``."""

    def __init__(self, rank: int = 0, answer: Signal = Signal.READY) -> None:
        self.rank, self.answer, self.sent = rank, answer, []

    def send_signal(self, signal: Signal) -> None:
        self.sent.append(signal)

    def receive(self) -> Signal:
        return self.answer


class ServersGone(RuntimeError):
    pass


def explain_nothing(error: BaseException) -> None:
    pass


def turn(feed: Any, *, stops: bool = False, explain: Any = explain_nothing) -> RankZeroTurn:
    stop: Any = SimpleNamespace(requested=stops)
    return RankZeroTurn(feed, stop, explain, feed.receive)


@pytest.mark.parametrize(("stops", "signal"), [(False, Signal.READY), (True, Signal.STOP)])
def test_rank_zero_works_and_then_decides_for_all(stops, signal):
    feed, done = RecordingFeed(), []
    assert turn(feed, stops=stops).run(lambda: done.append(len(feed.sent))) is stops
    assert done == [0], "the others must not go on before the work is done"
    assert feed.sent == [signal]


@pytest.mark.parametrize(("signal", "stops"), [(Signal.READY, False), (Signal.STOP, True)])
def test_other_ranks_do_nothing_and_obey(signal, stops):
    feed = RecordingFeed(rank=1, answer=signal)
    # Their own request does not count: ranks may hear of a signal at different moments.
    assert turn(feed, stops=not stops).run(lambda: pytest.fail("rank 1 worked")) is stops
    assert feed.sent == []


def test_a_failure_releases_the_others_before_it_is_raised():
    feed = RecordingFeed()
    with pytest.raises(ServersGone), turn(feed).releasing_others():
        raise ServersGone
    assert feed.sent == [Signal.FAIL]


def test_a_better_explanation_takes_the_place_of_the_failure():
    feed = RecordingFeed()

    def explain(error: BaseException) -> None:
        assert isinstance(error, ServersGone)
        raise TimeoutError("the rollout process has ended")

    with pytest.raises(TimeoutError, match="rollout process"):
        turn(feed, explain=explain).run(lambda: (_ for _ in ()).throw(ServersGone))
    assert feed.sent == [Signal.FAIL]


def test_the_others_wait_longer_than_rank_zero_may_take():
    config = JobConfig()
    config.inference.startup_timeout_seconds = 1000.0
    config.rollout.batch_timeout_seconds = 300.0
    config.weight_sync.timeout_seconds = 40.0
    assert patience_seconds(config) > 1000 + 2 * 300 + 2 * 40
