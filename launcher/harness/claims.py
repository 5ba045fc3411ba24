"""State claims and check them: a sentence, its bounds, and whether the measured figure is within.

Scenarios, benchmarks and papers use the same claims, with the same verdict and the same table. A
claim without a figure does not hold: a claim needs evidence.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from p2ptrain.errors import ConfigError

Json = dict[str, Any]  # Any: whatever JSON can hold


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence about a measurement that can be checked.

    `metric` of `of`, its ratio to that of `over`, or by how much it is above that of `minus`.
    """

    text: str
    """The sentence."""

    metric: str
    """A figure of a row in the comparison; a dot leads into an object."""

    of: str
    """The algorithm that it is about."""

    over: str | None = None
    """Its ratio to the figure of this algorithm counts."""

    minus: str | None = None
    """By how much it is above the figure of this algorithm counts."""

    at_least: float | None = None
    """It holds from here up; give this, `at_most`, or both."""

    at_most: float | None = None
    """It holds up to here. With both bounds a figure can also be too good to be true."""

    published: float | None = None
    """The published value of the same figure; shown beside the measured one."""

    source: str | None = None
    """Where it was published."""

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ConfigError(f"claim {self.text!r}: give at_least, at_most or both")
        for name in ("at_least", "at_most", "published"):
            if not math.isfinite(getattr(self, name) or 0.0):
                value = getattr(self, name)
                raise ConfigError(f"claim {self.text!r}: {name} = {value} must be a finite number")
        if self._least > self._most:
            raise ConfigError(
                f"claim {self.text!r}: at_least = {self.at_least:g} is above "
                f"at_most = {self.at_most:g}, so no figure is within"
            )
        if self.over is not None and self.minus is not None:
            raise ConfigError(f"claim {self.text!r}: give over, minus or neither, not both")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that must have run for the claim to be checked."""
        return tuple(name for name in (self.of, self.over, self.minus) if name is not None)

    @property
    def needs_a_model(self) -> bool:
        """True if it is about the model, not only about speed."""
        return self.metric == "time_to_target_s" or self.metric.startswith("final.")

    @property
    def _least(self) -> float:
        return -math.inf if self.at_least is None else self.at_least

    @property
    def _most(self) -> float:
        return math.inf if self.at_most is None else self.at_most

    def check(self, measured: float | None, missing: str = "") -> Json:
        """The claim as JSON, with the figure, whether it `holds`, and `why`, a sentence.

        Args:
            measured: the figure; None if there is none.
            missing: then why there is none.
        """
        holds = measured is not None and self._least <= measured <= self._most
        if self.at_most is None:
            bound = f"at least {self.at_least:g}"
        elif self.at_least is None:
            bound = f"at most {self.at_most:g}"
        else:
            bound = f"from {self.at_least:g} to {self.at_most:g}"
        why = missing or f"{measured:.4g} is {'' if holds else 'not '}{bound}"
        return {**asdict(self), "measured": measured, "holds": holds, "why": why}


def do_all_hold(claims: Sequence[Json]) -> bool:
    """True if no claim was contradicted."""
    return all(claim["holds"] for claim in claims)


def bound_of(claim: Json) -> str:
    """The bounds of a checked claim in a table: ``≥ 2``, ``≤ 2`` or ``1.8 to 2.2``."""
    least, most = claim["at_least"], claim["at_most"]
    if most is None:
        return f"≥ {least:g}"
    return f"≤ {most:g}" if least is None else f"{least:g} to {most:g}"


def claims_table(
    claims: Sequence[Json], title: str = "Claims", names: Sequence[str] | None = None
) -> Table:
    """A line per checked claim; `names` says where each is from."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    if names is not None:
        table.add_column("scenario", no_wrap=True)
    table.add_column("claim", ratio=1)
    for heading in ("bound", "published", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("holds")
    for index, claim in enumerate(claims):
        text = Text(claim["text"])
        if claim["measured"] is None:
            text.append(f"\n{claim['why']}", style="red")
        if claim["source"]:
            text.append(f"\n{claim['source']}", style="dim")
        verdict = Text("yes", style="green") if claim["holds"] else Text("no", style="bold red")
        figures = (_figure(claim["published"]), _figure(claim["measured"]))
        name = () if names is None else (names[index],)
        table.add_row(*name, text, bound_of(claim), *figures, verdict)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
