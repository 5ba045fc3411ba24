"""What benchmarks claim, in the form of a comparison's claims (`launcher.compare`)."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from launcher.collect import Json


def claim(
    text: str,
    metric: str,
    of: str,
    measured: float,
    *,
    over: str | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Json:
    """One sentence with its bound, what was measured, and whether it holds."""
    if at_least is not None:
        holds, bound = measured >= at_least, f"at least {at_least:g}"
    else:
        assert at_most is not None, "a claim has exactly one bound"
        holds, bound = measured <= at_most, f"at most {at_most:g}"
    return {
        "text": text,
        "metric": metric,
        "of": of,
        "over": over,
        "minus": None,
        "at_least": at_least,
        "at_most": at_most,
        "published": None,
        "source": None,
        "measured": measured,
        "holds": holds,
        "why": f"{measured:.4g} is {'' if holds else 'not '}{bound}",
    }


def print_claims(console: Console, claims: Sequence[Json]) -> None:
    """A line for each."""
    for one in claims:
        verdict = Text("yes ", "green") if one["holds"] else Text("no  ", "bold red")
        console.print(verdict + Text(f"{one['text']}: {one['why']}"))
