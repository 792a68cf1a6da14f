# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""A pipeline holds as many bytes as the simulator says, weight gradients that wait included."""


def test_saved_bytes_follow_the_simulator(run_ranks):
    names = ["1F1B", "ZBVZeroBubble", "VHalf", "VMin"]
    results = run_ranks("schedule_memory", 4, schedules=names, microbatches=12)
    peaks = dict.fromkeys(names, 0.0)
    for result in results:
        for name in names:
            measured, expected = result[name]["measured"], result[name]["expected"]
            assert abs(measured / expected - 1) < 0.05, (name, result[name])
            peaks[name] = max(peaks[name], measured)
    assert peaks["VMin"] < 0.8 * peaks["VHalf"] < 0.8 * peaks["ZBVZeroBubble"]
