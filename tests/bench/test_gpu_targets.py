"""What counts as met, and what the table says."""

import pytest

from bench.gpu_targets import ROWS, Found, Row, found, lines

LESS = Row(what="latency, ms", place="a/{}/ms", bound=10.0)
MORE = Row(what="rate", place="a/{}/rate", bound=300.0, at_least=True)
BELOW = Row(what="first token", place="a/{}/ttft", below_peer=True)


def of(row: Row, ours: float | None, peer: float | None = None, best: float | None = None) -> Found:
    return Found(row=row, ours=ours, peer=peer, best=best)


@pytest.mark.parametrize(
    ("one", "is_met"),
    [
        (of(LESS, 10.0), True),
        (of(LESS, 10.1), False),
        (of(MORE, 300.0), True),
        (of(MORE, 299.9), False),
        (of(BELOW, 5.0, 6.0), True),
        (of(BELOW, 6.0, 6.0), False),
        (of(BELOW, 5.0), None),
        (of(LESS, None, 5.0), None),
        (of(LESS, float("nan")), False),
    ],
)
def test_a_target_is_met_up_to_its_bound_and_below_the_peer_only(one: Found, is_met: bool | None) -> None:
    assert one.is_met is is_met


def test_times_is_how_much_better_whatever_the_direction() -> None:
    assert of(LESS, 5.0, 20.0).times(20.0) == 4.0
    assert of(MORE, 400.0, 100.0).times(100.0) == 4.0
    assert of(LESS, None, 20.0).times(20.0) is None
    assert of(LESS, 5.0).times(None) is None


def test_the_best_of_the_peers_is_what_has_to_be_beaten() -> None:
    figures = {"a/ours": 5.0}
    figures |= {row.place.format("ours"): 8.0 for row in ROWS}
    figures |= {row.place.format("peer-best"): 20.0 for row in ROWS}
    figures |= {row.place.format("peer-many"): 15.0 for row in ROWS}
    rows = found(figures.get, ["peer-best", "peer-many", "peer-none"])
    assert {one.row.at_least: one.best for one in rows} == {True: 20.0, False: 15.0}
    assert not any(one.beats_best for one in rows)
    assert all(one.beats_best is None for one in found(lambda place: None, ["peer-best"]))


def test_the_table_says_what_is_missed_and_what_was_not_measured() -> None:
    text = [
        *lines(
            [
                of(LESS, 5.0, 20.0, 16.0),
                of(LESS, 11.0, 20.0, 16.0),
                of(MORE, None),
                of(BELOW, 4.0, 5.0),
                of(Row(what="no aim", place="a/{}/x"), 1.0),
            ]
        )
    ]
    ends = [line.split()[-1] for line in text[1:]]
    assert "OK" in text[1]
    assert "MISSED, under 2 times the best" in text[2]
    assert text[3].endswith("not measured")
    assert "< 5" in text[4]
    assert ends[4] == "1.00"
