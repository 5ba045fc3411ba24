"""`make compare`: how `auto` did beside the others, from rows made by hand."""

from p2plab.across import Row, beside, page


def row(name: str, *curve: tuple[float, float], samples_per_s: float = 100.0) -> Row:
    return Row(name, samples_per_s, curve[-1][1] if curve else None, 1e6, curve)


def test_auto_is_compared_with_the_best_and_the_median_of_the_others():
    rows = [
        row("allreduce", (10.0, 0.5), (20.0, 0.4)),
        row("dear", (5.0, 0.5), (10.0, 0.4)),
        row("wagma", (5.0, 0.9)),
        row("auto", (6.0, 0.6), (12.0, 0.404)),
    ]
    assert beside("one_slow", rows) == "| `one_slow` | `dear` | 10 | 20 | 12 | 1.2 | 1.01 |"
    assert "`auto` beside the best" in page({"one_slow": rows})


def test_where_nothing_was_trained_speed_counts():
    rows = [row("dear", samples_per_s=64), row("auto", samples_per_s=80)]
    assert beside("hidden", rows) == "| `hidden` | `dear` | 10 | 10 | 8 | 0.8 |  |"


def test_without_auto_the_page_has_no_such_table():
    rows = [row("allreduce", (10.0, 0.5)), row("dear", (5.0, 0.5))]
    assert beside("one_slow", rows) is None
    assert "beside the best" not in page({"one_slow": rows})
