"""Every rank receives its own rows and the table of all samples, and hears the end."""


def test_ranks_receive_the_rows_of_their_coordinate_and_the_whole_table(run_ranks):
    for result in run_ranks("feed_ranks", 3):
        assert result["received"] == [
            [True, 5, 9, step, True, [3 + step, 0], 6, 1 + step] for step in range(3)
        ]
        assert result["signal"] == "STOP"
        assert result["total"] == 6
        assert result["metrics"].pop("norm of rank 0") == 5.0
        assert result["metrics"] == {"sum": -5, "mean": -2.5, "max": -2, "min": -3, "loss": -2.5}


def test_ranks_that_fetch_their_rollouts_have_the_rows_that_rank_zero_would_send(run_ranks):
    for result in run_ranks("feed_fetch_ranks", 4):
        assert result["results"] == [[True, True]] * 3
        # A batch that is not held any more.
        assert (
            "it holds the batch of version 2, and the request is for version 0" in result["refused"]
        )
