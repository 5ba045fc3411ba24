"""Write the sentences and cells of a report: headline, claims, events, peers.

Sentences are generated from the figures of the run and claim no more than these show.
"""

import shlex
from collections import Counter
from collections.abc import Sequence

from p2plab.collect import failed_share, failures
from p2plab.compare import seconds
from p2plab.harness.claims import Json, bound_of
from p2plab.plot import curves_title, is_slow, strip_title
from p2plab.records import SETTINGS, Event
from p2plab.run import Run
from p2plab.scenario import Scenario
from p2ptrain.console.progress import named
from p2ptrain.ids import Seconds

MOST_EVENTS = 60
"""Events per algorithm; a failing fleet has thousands, and the first name the cause."""

_TOGETHER_S: Seconds = 2.0
"""A peer that is ready this soon after the first step counts as started with the others."""


def lede(scenario: Scenario, runs: Sequence[Run], comparison: Json) -> list[str]:
    """The main results, in a few sentences."""
    said = [comparison.get("partial") or ""]
    if any(run.curve.time_to_target_s for run in runs[1:]) and runs[0].curve.time_to_target_s:
        said.append(curves_title(scenario, runs) + ".")
    said += [_speed(comparison["rows"]), _waiting(runs), _claims(comparison["claims"])]
    said.append("" if scenario.gradients else "Steps were only priced: nothing was trained.")
    return [sentence for sentence in said if sentence]


def _speed(rows: Sequence[Json]) -> str:
    first, *others = rows
    if not others or not first["samples_per_s"]:
        return f"{first['algorithm']} trains {first['samples_per_s']:,.0f} samples per second."
    best = max(others, key=lambda row: float(row["samples_per_s"]))
    ratio = best["ratio"]["samples_per_s"]
    return (
        f"{best['algorithm']} trains {best['samples_per_s']:,.0f} samples per second, "
        f"{ratio:.2f} times the {first['samples_per_s']:,.0f} of {first['algorithm']}."
    )


def _waiting(runs: Sequence[Run]) -> str:
    shares = [(_waiting_share(run), run.algorithm) for run in runs]
    known = [f"{share:.0%} under {name}" for share, name in shares if share is not None]
    return f"Share of their time that peers wait for others: {_enumerated(known)}." if known else ""


def _waiting_share(run: Run) -> float | None:
    steps = [step for history in run.histories for step in history.steps]
    wait_s = sum(step.wait_s for step in steps)
    total_s = wait_s + sum(step.compute_s for step in steps)
    return wait_s / total_s if total_s else None


def _claims(claims: Sequence[Json]) -> str:
    broken = sum(not claim["holds"] for claim in claims)
    if not claims:
        return ""
    if not broken:
        few = {1: "The claim holds.", 2: "Both claims hold."}
        return few.get(len(claims), f"All {len(claims)} claims hold.")
    return f"{broken} of {len(claims)} claims {'does' if broken == 1 else 'do'} not hold."


def tiles(comparison: Json) -> list[Json]:
    """A few large figures, each with `figure` and `text`."""
    first, *others = comparison["rows"]
    found = []
    ratios = [(r["ratio"]["samples_per_s"], r["algorithm"]) for r in others]
    known = [(ratio, name) for ratio, name in ratios if ratio is not None]
    if known:
        ratio, name = max(known)
        found.append(
            {
                "figure": f"{ratio:.2f}x",
                "text": f"{name} trains {ratio:.2f}x the samples per second of "
                f"{first['algorithm']}",
            }
        )
    times = [(r["time_to_target_s"], r["algorithm"]) for r in comparison["rows"]]
    reached = [(at, name) for at, name in times if at is not None]
    if reached:
        at, name = min(reached)
        found.append({"figure": f"{at:.1f} s", "text": f"{name} is the first at the target"})
    claims = comparison["claims"]
    if claims:
        held = sum(claim["holds"] for claim in claims)
        found.append({"figure": f"{held} of {len(claims)}", "text": "claims hold"})
    return found


def _beside(checked: Json) -> str:
    for word in ("over", "minus"):
        if checked[word]:
            return f" {word} {checked[word]}"
    return ""


def claim(checked: Json) -> Json:
    """A row of the table of claims: `text`, `bound`, `published`, `measured`, `holds`, `note`."""
    what = f"{checked['metric']} of {checked['of']}"
    return {
        "text": checked["text"],
        "what": what + _beside(checked),
        "source": checked["source"] or "",
        "why": "" if checked["measured"] is not None else checked["why"],
        "bound": bound_of(checked),
        "published": number(checked["published"], ".4g"),
        "measured": number(checked["measured"], ".4g"),
        "holds": checked["holds"],
    }


def strips(runs: Sequence[Run]) -> list[str]:
    """How the peers of each run spent their time."""
    return [strip_title(run, most=len(run.histories)) for run in runs]


def groups(summary: Json) -> Json:
    """How many groups were completed and how many were not, by reason, the commonest first.

    Counted by members: a group of four that failed counts four times.
    """
    ended: Counter[str] = Counter()
    for peer in summary["peers"]:
        ended.update(peer["groups_failed"] or {})
    formed = sum(peer["groups_formed"] or 0 for peer in summary["peers"])
    total = formed + ended.total()
    reasons = sorted(ended.items(), key=lambda item: (-item[1], item[0]))
    return {
        "name": summary["algorithm"],
        "formed": f"{formed:,}",
        "failed": f"{sum(failures(ended).values()):,}",
        "share": number(failed_share(summary["peers"]), ".1%"),
        "reasons": [
            {"why": why.replace("_", " "), "count": f"{n:,}", "share": round(100 * n / total, 2)}
            for why, n in reasons
        ],
    }


_KINDS = {
    "crash": "killed",
    "pause": "paused",
    "slow": "slowed down",
    "drift": "clock drifts",
    "throttle": "link throttled",
    "partition": "cut off",
    "leave": "left",
    "join": "came",
}


def faults(summary: Json) -> Json:
    """The costs of faults for one algorithm: a row for each, and a sentence for all."""
    cost = summary["faults"]
    rows = [
        {
            "number": count,
            "what": f"{', '.join(instance['peers'])}: {_KINDS[instance['kind']]}",
            "planned": _planned(instance),
            "began": f"{instance['at_s']:.1f} s",
            "back": seconds(instance["back_s"], "-"),
            "before": number(instance["before"], ",.0f"),
            "during": number(instance["during"], ",.0f"),
            "after": number(instance["after"], ",.0f"),
            "stall": seconds(instance["stall_s"], "-"),
            "recovery": seconds(instance["recovery_s"], "-"),
        }
        for count, instance in enumerate(cost["instances"], start=1)
    ]
    said = ""
    if cost["kept_of_present"] is not None:
        said = (
            f"From the first fault on, {cost['present']:.0%} of the peers that had been there "
            f"were there, on average, and {cost['kept']:.0%} of the throughput: "
            f"{cost['kept_of_present']:.2f} times their share."
        )
    return {"name": summary["algorithm"], "rows": rows, "summary": said}


def _planned(instance: Json) -> str:
    if instance["planned_s"] is None:
        return f"step {instance['planned_step']}"
    return f"{instance['planned_s']:.1f} s"


def events(run: Run) -> Json:
    """Events of peers between the first step and the last, once for all observers."""
    start = run.curve.started_at
    found = [] if start is None else _within(run, start)
    seen: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(found, key=lambda e: (e.at, e.subject, e.state)):
        is_own = event.state in ("warning", SETTINGS)
        key = (event.subject, event.why if is_own else event.state)
        seen.setdefault(key, []).append(event)
    lines = [(e[0].at - (start or 0.0), _event(e)) for e in seen.values()]
    lines += [
        (history.last_at - start, f"{history.name} was lost; its last record is of this moment")
        for history in run.histories
        if history.lost and history.last_at is not None and start is not None
    ]
    lines.sort()
    return {
        "name": run.algorithm,
        "lines": [{"at": f"{at:.1f} s", "text": text} for at, text in lines[:MOST_EVENTS]],
        "more": max(0, len(lines) - MOST_EVENTS),
        "notes": list(run.notes),
    }


def _within(run: Run, start: Seconds) -> list[Event]:
    """Drop joins and departures at both ends of a run: they are no events."""
    ends = [h.steps[-1].at for h in run.histories if h.steps and not h.lost]
    first_end = min(ends, default=start + run.wall_s)
    together = start + _TOGETHER_S
    began = {h.name for h in run.histories if (h.ready_at or 0.0) < together}
    return [
        event
        for history in run.histories
        for event in history.events
        if start < event.at < first_end
        and not (
            event.state == "alive" and event.subject in began and event.at < start + _TOGETHER_S
        )
    ]


def _event(same: Sequence[Event]) -> str:
    first = same[0]
    if first.state == "warning":
        return named(first.subject, first.why)
    if first.state == SETTINGS:
        return f"the swarm works with {first.why} (proposed by {first.subject})"
    by = f", seen by {len(same)} peers" if len(same) > 1 else ""
    text = {"alive": "is in", "left": "left", "dead": "is dead", "suspect": "is suspected"}
    why = f" ({first.why})" if first.why else ""
    return f"{first.subject} {text.get(first.state, first.state)}{why}{by}"


def peer(scenario: Scenario, rank: int, totals: Json) -> Json:
    """A row of the table of peers."""
    compute_s, wait_s = totals["compute_s"] or 0.0, totals["wait_s"] or 0.0
    failed = sum(failures(totals["groups_failed"] or {}).values())
    return {
        "name": totals["peer"],
        "state": totals["state"] if totals["state"] != "ended" else "",
        "why": totals["why"],
        "slow": is_slow(scenario, rank),
        "steps": number(totals["steps"], ",d"),
        "samples": number(totals["samples"], ",d"),
        "compute_s": f"{compute_s:.1f}",
        "wait_s": f"{wait_s:.1f}",
        "waiting": round(100 * wait_s / (compute_s + wait_s), 1) if compute_s + wait_s else 0.0,
        "comm_s": number(totals["comm_s"], ".1f"),
        "sent": size(totals["sent_bytes"]),
        "received": size(totals["received_bytes"]),
        "formed": number(totals["groups_formed"], ",d"),
        "failed": f"{failed:,}",
        "stale": f"{number(totals['staleness_p50'], 'g')} / {number(totals['staleness_p99'], 'g')}",
    }


def command(scenario: Scenario, backend: str) -> str:
    """The command that repeats the run, from the scenario beside the report; FILE lists hosts."""
    hosts = ("--hosts", "FILE") if backend == "ssh" else ()
    names = ",".join(scenario.algorithms)
    return shlex.join(
        ("p2plab", "run", "scenario.toml", "--backend", backend, *hosts, "--algorithms", names)
    )


def simulated(summaries: Sequence[Json]) -> str:
    """A note on figures from a simulation; empty where they were measured."""
    traces = [
        f"{one['algorithm']} {one['trace_hash'][:16]}" for one in summaries if is_virtual(one)
    ]
    if not traces:
        return ""
    return (
        "Simulated: peers in virtual time ran the protocol, the driver and the algorithms that run "
        "for real; a step lasts as long as [pace] says, and what is sent as long as [link] says. "
        f"Seed {summaries[0]['seed']} gives these traces again: {', '.join(traces)}."
    )


def is_virtual(summary: Json) -> bool:
    """True if a simulation yielded this summary."""
    return "trace_hash" in summary


def thinned(scenario: Scenario, drawn: Sequence[Json], listed: int, points: int) -> list[str]:
    """What this file leaves out, in sentences; the records beside it are complete."""
    said = [f"Lines have at most {points} points."]
    for one in drawn:
        timeline = one["timeline"]
        if timeline["exact_to"] - timeline["exact_from"] < one["wall_s"] - 1e-3:
            said.append(
                f"{one['name']}: single steps are drawn from {timeline['exact_from']:.1f} s to "
                f"{timeline['exact_to']:.1f} s, shares of time everywhere else."
            )
    rows = max(len(one["timeline"]["rows"]) for one in drawn)
    if rows < scenario.peers:
        said.append(
            f"Timelines show {rows} of {scenario.peers} peers, slow and lost ones among them; "
            "in who met whom, neighbours by rank share a row. All other figures are of all peers."
        )
    if scenario.peers > listed:
        said.append(
            f"Tables list {listed} of {scenario.peers} peers; all are in each summary.json."
        )
    return said


def number(value: float | None, form: str) -> str:
    """Print a figure, or a dash if there is none."""
    return "-" if value is None else format(value, form)


def size(count: int | None) -> str:
    """Bytes, readable."""
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def _enumerated(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
