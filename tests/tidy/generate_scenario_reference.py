"""Write the reference of scenarios: `python -m tests.tidy.generate_scenario_reference FILE`.

Every key is a field of a dataclass, and what is said of it is the docstring beneath that field.
"""

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2plab.scenario import BY_THE_LAB, METRICS, Scenario
from p2ptrain.config import RunConfig
from p2ptrain.documented import texts_of
from tests.tidy.generate_algorithm_pages import markdown

UNITS = {
    "_mbit_s": "Mbit/s",
    "_mbit": "Mbit/s",
    "_kib": "KiB",
    "_mb": "MB",
    "_bytes": "bytes",
    "_ms": "milliseconds",
    "_s": "seconds",
}
"""What the end of a key says of its unit; the longer ends first."""

INTRODUCTION = """# Every key of a scenario

Made from the dataclasses of the code by `make scenario-reference`. `p2plab list` names the
scenarios that come with the package, `p2plab show NAME` prints one with the value of every key, and
`p2plab new NAME` writes one with comments to begin with.

A scenario is the configuration of its peers, and what the lab adds. The keys of a peer may stand
under `[peer]` or at the top, in one of the two places. An entry of `[[compare]]` or `[[overlays]]`
may have them too: they are then those of one algorithm, or of some peers. No scenario has these,
which the lab sets for each peer: {lab}.

**Equal samples.** With `stop.samples` all algorithms end at the same number of samples of the whole
swarm, within 2 % or one batch of each peer, whichever is more
([how](membership.md#progress-of-the-whole-swarm)).

**Other peers, shorter runs.** Under another number of peers than the file's (`--peers`) and with
`--quick` the claims of a scenario are not applicable, and the run says so. `--quick` leaves out
faults and devices too: it takes a few steps of each of at most 16 peers, to see that they run.

**What a claim can be about.** The `metric` of one of `[[claims]]` is one of these, a dot leading
into an object: {metrics}. Of a task with classes also `final.recall.3`: the fraction of class 3
that was found. `_s` is seconds; bytes are those that a peer sent.
"""


def page() -> str:
    """The whole page, Markdown."""
    own = [f for f in dataclasses.fields(Scenario) if f.name in Scenario.__annotations__]
    peer = [
        f
        for f in dataclasses.fields(RunConfig)
        if f.name not in (*BY_THE_LAB, *Scenario.__annotations__)
    ]
    lab, metrics = (", ".join(f"`{key}`" for key in keys) for keys in (BY_THE_LAB, METRICS))
    sections = [
        *_sections("At the top", "", Scenario, own),
        *_sections("`[peer]`", "peer.", RunConfig, peer),
    ]
    return "\n\n".join([INTRODUCTION.format(lab=lab, metrics=metrics).strip(), *sections]) + "\n"


def _sections(
    title: str, prefix: str, kind: type, fields: list[dataclasses.Field[Any]]
) -> Iterator[str]:
    """A table, then the tables within it."""
    texts = {name: markdown(text) for name, text in texts_of(kind).items()}
    hints = typing.get_type_hints(kind)
    within = {field.name: _table_of(hints[field.name]) for field in fields}
    lines = [f"## {title}", _duty(kind)]
    for field in fields:
        if within[field.name] is None:
            unit = next((unit for end, unit in UNITS.items() if f"_{field.name}".endswith(end)), "")
            default = _default(field) + (f" ({unit})" if unit else "")
            lines.append(f"**`{field.name}`**: {default}  \n{texts.get(field.name, '')}".rstrip())
    yield "\n\n".join(line for line in lines if line)
    for name, table in within.items():
        if table is not None:
            inner, is_list = table
            bracket = f"[[{prefix}{name}]]" if is_list else f"[{prefix}{name}]"
            yield from _sections(
                f"`{bracket}`", f"{prefix}{name}.", inner, list(dataclasses.fields(inner))
            )


def _duty(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")


def _table_of(hint: Any) -> tuple[type, bool] | None:  # Any: whatever stands behind a colon
    """The dataclass that a hint names, and whether there may be several; None if it is none."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return hint, False
    parts = [part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)]
    if parts and typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return parts[0], typing.get_origin(hint) is tuple
    return None


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
