"""Every rank receives its own rows and the table of all samples, and hears the end."""


def test_ranks_receive_the_rows_of_their_coordinate_and_the_whole_table(run_ranks):
    for result in run_ranks("feed_ranks", 3):
        assert result["received"] == [
            [True, 5, 9, step, 7 + step, [3 + step, 0]] for step in range(3)
        ]
        assert result["signal"] == "STOP"
        assert result["total"] == 6
