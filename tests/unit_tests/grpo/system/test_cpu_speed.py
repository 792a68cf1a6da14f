# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Whether a CPU is fast at bfloat16 is measured, and not taken from its name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan.grpo.system import cpu_speed
from torchtitan.grpo.system.cpu_speed import FAST, bfloat16_speedup


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    bfloat16_speedup.cache_clear()
    yield
    bfloat16_speedup.cache_clear()


def tell_flags(flags: str, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n\n" * 2)
    monkeypatch.setattr(cpu_speed, "_CPU_INFO", file)


def set_clock(monkeypatch, of_float32: list[float], of_bfloat16: list[float]) -> None:
    """Lets the products of each kind take so many seconds, one after the other."""
    turns = zip(of_float32, of_bfloat16, strict=True)
    readings = (reading for turn in turns for taken in turn for reading in (0.0, taken))
    monkeypatch.setattr(cpu_speed.time, "thread_time", lambda: next(readings))


@pytest.mark.parametrize("flags", ["amx_bf16 amx_int8", "avx512_bf16", "asimd bf16"])
def test_a_cpu_with_the_instructions_is_measured_once(flags, tmp_path, monkeypatch):
    tell_flags(flags, tmp_path, monkeypatch)
    set_clock(monkeypatch, [9.0, *[2.0] * 6], [99.0, *[1.0] * 6])
    assert [bfloat16_speedup(), bfloat16_speedup()] == [2.0, 2.0]


def test_instructions_that_are_emulated_are_not_fast(tmp_path, monkeypatch):
    tell_flags("avx512_bf16", tmp_path, monkeypatch)
    set_clock(monkeypatch, [1.0] * 7, [3.0] * 7)
    assert bfloat16_speedup() < FAST


def test_repetitions_that_something_delays_do_not_count(tmp_path, monkeypatch):
    tell_flags("avx512_bf16", tmp_path, monkeypatch)
    set_clock(monkeypatch, [9.0, 8.0, 2.0, 7.0, 5.0, 2.5, 6.0], [9.0, 6.0, 7.0, 1.5, 1.0, 3.0, 3.0])
    assert bfloat16_speedup() == 2.0


@pytest.mark.parametrize("flags", ["avx512f", "avx512_bf16_of_another_kind", None])
def test_a_cpu_without_the_instructions_is_not_measured(flags, tmp_path, monkeypatch):
    if flags is None:
        monkeypatch.setattr(cpu_speed, "_CPU_INFO", tmp_path / "absent")
    else:
        tell_flags(flags, tmp_path, monkeypatch)
    monkeypatch.setattr(cpu_speed, "_measured", lambda: pytest.fail("it was measured"))
    assert bfloat16_speedup() == 1.0


def test_measuring_leaves_threads_and_random_numbers_as_they_are(tmp_path, monkeypatch):
    tell_flags("avx512_bf16", tmp_path, monkeypatch)
    before = torch.get_num_threads(), torch.get_rng_state()
    assert bfloat16_speedup() > 0
    assert torch.get_num_threads() == before[0] and torch.equal(torch.get_rng_state(), before[1])
