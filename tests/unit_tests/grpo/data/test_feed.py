"""Every rank receives its own rows, and hears the end."""


def test_ranks_receive_the_rows_of_their_coordinate(run_ranks):
    for result in run_ranks("feed_ranks", 4):
        assert result["received"] == [[True, 5, 9, 0, 7], [True, 5, 9, 1, 8]]
        assert result["signal"] == "STOP"
        assert result["total"] == 10
