# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The leader calls another rank's agent as if it were its own."""

NOTHING = type(None)


def test_calls_and_their_failures_cross_ranks(run_ranks):
    leader, follower = run_ranks("channel_ranks", 2)
    assert leader["prepared"]
    assert leader["facts"]
    assert leader["opened"]
    assert leader["gathering_waits"]
    assert leader["join"] == ["CallFailed", "rank 1: RuntimeError: http://server did not come"]
    assert leader["error_is_freed"]
    kind, message = leader["write"]
    assert kind == "OSError"
    assert message.startswith("rank 1: OSError: [Errno 28] No space left on device")
    assert leader["send"] == "given up"
    assert leader["gone"] == ["Rank 1 no longer answers calls."] * 2
    assert follower["calls"] == [
        ["gather", 1, 7, True],
        ["prepare", 7, 0, 6],
        ["open", "http://server", 3, "gloo"],
        ["wait_copied", 0, 8],
        ["drop", 5],
        ["send", "http://server", 7, 0, None],
        ["send", "http://server", 8, 0, None],
        ["leave", "http://server"],
        ["close"],
    ]
