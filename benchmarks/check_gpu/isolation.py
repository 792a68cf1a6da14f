# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Compares training steps with and without each kind of work that a push does beside them.

Each case is preceded by undisturbed steps of its own, since a GPU's clock changes as it gets warm.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from check_gpu.parts import (
    Pushed,
    Stopwatch,
    TrainingSteps,
    device_of,
    join_alone,
    make_pushed,
    percentile,
)
from check_gpu.row import Row, Settings, judged
from check_gpu.silent_server import broadcast_to_silent_server
from torchtitan.grpo.system.process_tuning import yield_to_training
from torchtitan.grpo.weight_wire.sparse import encode
from torchtitan.grpo.weight_wire.version_files import write_part

_MAX_STEPS, _MAX_SECONDS, _MIN_STEPS = 300, 8.0, 50
_SERVERS = 4
_PUBLISH_EVERY = 4
_JOIN_SECONDS = 60.0
_PART, _MILLISECONDS = 1.1, 1.0
_BOUND = "p99 grows by at most 10 % or 1 ms"


class Isolation:
    """Training steps on a device, with the trainer's side of a push."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.device = device_of(settings)
        self.training = TrainingSteps(self.device)
        self.pushed = make_pushed(self.training.parameters, self.device, num_slots=2)
        for slot in range(2):  # also lets the GPU pick its kernels
            self._step(None).wait_ms()
            self.pushed.snapshots.copy_into(slot)
            self.pushed.snapshots.read(slot)

    def _step(self, pushed: Pushed | None, slot: int | None = None) -> Stopwatch:
        with Stopwatch(self.device) as watch:
            self.training.backward()
            if pushed is not None:
                pushed.snapshots.fence()
            self.training.update()
            if pushed is not None and slot is not None:
                pushed.snapshots.copy_into(slot)
        return watch

    def steps(self, pushed: Pushed | None = None) -> list[float]:
        """Returns the milliseconds of steps, which publish versions if ``pushed`` is given.

        The host is one step ahead of the device, as in a run, which waits for the metrics of the
        former step.
        """
        deadline, times, watch = time.monotonic() + _MAX_SECONDS, [], None
        for number in range(_MAX_STEPS if self._settings.on_gpu else _MIN_STEPS):
            if number >= _MIN_STEPS and time.monotonic() > deadline:
                break
            publishes = number % _PUBLISH_EVERY == 0
            former, watch = (
                watch,
                self._step(pushed, number // _PUBLISH_EVERY % 2 if publishes else None),
            )
            if former is not None:
                times.append(former.wait_ms())
        assert watch is not None
        return [*times, watch.wait_ms()]

    def compare(self, case: str, disturbed: Callable[[list[float]], list[float]]) -> Row:
        """Returns the row of one case.

        Args:
            case: Name of the case.
            disturbed: Maps undisturbed times to those of steps that are disturbed.
        """
        quiet = self.steps()
        busy = disturbed(quiet)
        before, after = percentile(quiet, 0.99), percentile(busy, 0.99)
        figures = {
            "quiet_p50_ms": percentile(quiet, 0.5), "quiet_p99_ms": before,
            "p50_ms": percentile(busy, 0.5), "p99_ms": after, "steps": float(len(busy)),
        }  # fmt: skip
        if not self._settings.on_gpu:  # both sides share the cores
            return Row(case, "measured", figures)
        holds = after <= max(before * _PART, before + _MILLISECONDS)
        return judged(case, holds, _BOUND, figures)

    def beside(self, case: str, work: Callable[[], object]) -> Row:
        """Returns the row of work that a thread repeats beside the steps."""

        def disturbed(quiet: list[float]) -> list[float]:
            with repeating(work):
                return self.steps()

        return self.compare(case, disturbed)

    def beside_silent(self, count: int) -> Row:
        """Returns the row of broadcasts that ``count`` servers do not answer."""
        payload = self.pushed.slots.buckets(0)
        assert payload is not None, "this rank is the source"

        def disturbed(quiet: list[float]) -> list[float]:
            seconds = 2 * sum(quiet) / 1e3 + 3
            with broadcast_to_silent_server(self.device, payload[0], seconds, count) as under_way:
                times = self.steps()
                if not under_way():
                    raise RuntimeError(
                        "The broadcasts must outlast the steps that run beside them, but they ended "
                        "before them."
                    )
            return times

        return self.compare(f"broadcasts to {count} silent servers", disturbed)


@contextmanager
def repeating(work: Callable[[], object]) -> Iterator[None]:
    """Repeats ``work`` on a thread during the block.

    Raises:
        RuntimeError: If the work failed, was never done, or does not end.
    """
    ending, count, errors = threading.Event(), 0, []

    def repeat() -> None:
        nonlocal count
        yield_to_training()
        try:
            while not ending.is_set():
                work()
                count += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=repeat, name="check-gpu-background", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_JOIN_SECONDS)
    if errors:
        raise RuntimeError(f"The work beside the steps failed: {errors[0]}") from errors[0]
    if thread.is_alive() or count == 0:
        raise RuntimeError(f"The work beside the steps must end in {_JOIN_SECONDS:g} s.")


def run(settings: Settings) -> Iterator[Row]:
    """Yields one row for each kind of work."""
    join_alone()
    isolation = Isolation(settings)
    pushed = isolation.pushed
    yield isolation.compare("copies into pinned slots", lambda _: isolation.steps(pushed))
    specs = [bucket.spec for bucket in pushed.plan.sources[0].buckets]
    slots = [pushed.slots.buckets(slot) for slot in range(2)]
    previous, current = slots
    assert previous is not None and current is not None, "this rank is the source"

    def write() -> None:
        write_part(settings.folder, 0, list(zip(specs, current, strict=True)))

    def encode_all() -> None:
        for spec, old, new in zip(specs, previous, current, strict=True):
            numels = [torch.Size(shape).numel() for shape in spec.shapes]
            encode(old, new, numels, torch.bfloat16.itemsize)

    yield isolation.beside("writing a version to disk", write)
    yield isolation.beside("encoding deltas", encode_all)
    if settings.on_gpu:
        for count in (1, _SERVERS):
            yield isolation.beside_silent(count)
    pushed.snapshots.close()
