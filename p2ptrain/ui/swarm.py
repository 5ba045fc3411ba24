"""Derive what is shown of a swarm from what its peers report.

Facts go in with the time: the members that one peer knows (`saw`), a peer's report (`answered`),
a peer that did not answer (`failed`), and the end of each second (`tick`). Out come a `snapshot`
for a page that opens, and the changes since the last `take_update` for all that are open.

Rules:

1. A member's state is that in the view of the asked peer, except that a peer that answers is never
   worse than suspected.
2. A peer's figures are its own; those of a peer that does not answer count in no sum and no mean.
3. An average is seen when a member reports more completed groups than before. All members report
   it, so the same members are drawn at most once in `PULSE_S`; a rate counts each member's share.
4. Everything is bounded: `MAX_PEERS`, and the lengths beside the deques.

Reports come from other machines. Names and sentences are shown as text and never interpreted, and
figures that are not finite are left out.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.wire import Report
from p2ptrain.net.wire_carried import CARRIED, name_at
from p2ptrain.ui import diagnosis, history
from p2ptrain.ui.diagnosis import Figures, Slowness
from p2ptrain.ui.faults import FaultLog
from p2ptrain.ui.history import History

MAX_PEERS = 4096
PULSE_S: Seconds = 1.0
PULSES = 400
EVENTS = 400
SLOW_AFTER = 3
"""Seconds for which a peer is slow, or no longer slow, before a line of the log says so."""

TOGETHER = 5
"""More peers than this that become slow at the same time share a line of the log."""

GONE = ("dead", "left", "no answer")
"""The states of a peer that takes no part, as far as can be seen."""

OF_PHASES = {Phase.ARRIVING: "joins", Phase.TRAINING: "trains", Phase.DONE: "done"}

Level = Literal["note", "good", "warn", "bad"]
Json = dict[str, Any]  # Any: whatever JSON can hold

COLUMNS = (
    "name",
    "address",
    "state",
    "doing",
    "steps",
    "steps_per_s",
    "samples",
    "samples_per_s",
    "waiting",
    "loss",
    "distance",
    "averages",
    "failed",
    "partners",
    "link_mbit",
    "cause",
    "why",
)
"""A peer's row, in order."""


@dataclass(slots=True)
class Shown:
    """One peer."""

    index: int
    """Its number in averages and lanes; never given to another peer."""

    member: Member
    report: Report | None = None
    answered_at: Seconds = 0.0
    why_not: str = ""
    """Why it did not answer the last time; empty if it did."""

    steps_per_s: float = 0.0
    slowness: Slowness | None = None
    slow_for: int = 0
    """Seconds in a row in which the log and the diagnosis disagree."""

    is_logged_slow: bool = False
    state: str = "new"

    @property
    def is_live(self) -> bool:
        """True if its figures are those of this moment."""
        return self.report is not None and self.state not in GONE

    @property
    def me(self) -> Member:
        """Its own record if there is one, else that of others."""
        return self.report.hello.me if self.report else self.member

    def figures(self) -> Figures | None:
        """What a diagnosis needs; None unless it trains."""
        if not self.report or not self.is_live or self.state in ("joins", "done"):
            return None
        share = min(1.0, finite(self.report.wait_share) or 0.0)
        return Figures(finite(self.report.samples_per_s) or 0.0, share, self.me.link_mbit)


class SwarmView:
    """All that is shown of one swarm.

    Args:
        now: the time of the first fact, from which all times that are shown are counted.
    """

    def __init__(self, now: Seconds) -> None:
        self.peers: dict[PeerId, Shown] = {}
        self.history = History()
        self.faults = FaultLog()
        self.algorithm = ""
        self.epoch = 0
        self.model_size = 0
        self.progress = 0
        self.sentences: list[str] = []
        """Which peers are slow, and why."""
        self.events: deque[tuple[Seconds, Level, str, str]] = deque(maxlen=EVENTS)
        """When, how bad, which peer, a sentence."""
        self._started = self._now = now
        self._pulses: deque[tuple[Seconds, tuple[int, ...]]] = deque(maxlen=PULSES)
        self._pulsed: dict[tuple[int, ...], Seconds] = {}
        self._averages = 0.0  # since the last tick
        self._ticked = now
        self._changed: set[PeerId] = set()
        self._fresh_events: list[tuple[Seconds, Level, str, str]] = []
        self._fresh_pulses: list[tuple[Seconds, tuple[int, ...]]] = []
        self._fresh_seconds: list[tuple[history.Point, str]] = []
        self._is_known = False

    @property
    def now(self) -> Seconds:
        """The time of the last fact, counted from the first."""
        return self._now - self._started

    # --- facts ------------------------------------------------------------------------------------

    def saw(self, members: Iterable[Member], now: Seconds) -> None:
        """The members that one peer knows."""
        self._now = now
        is_first = not self._is_known
        for member in members:
            shown = self.peers.get(member.peer)
            if shown is None:
                shown = self._add(member)
                if shown and not is_first and member.state <= MemberState.SUSPECT:
                    self._log("good", member.peer, f"{member.peer} joined")
            elif member.incarnation >= shown.member.incarnation or shown.state in GONE:
                shown.member = member
            if shown:
                self._settle(shown, tells=not is_first)
        self._is_known = self._is_known or bool(self.peers)

    def answered(self, report: Report, now: Seconds) -> None:
        """A peer's own report."""
        self._now = now
        name = report.hello.me.peer
        shown = self.peers.get(name) or self._add(report.hello.me)
        if shown is None:
            return
        before = shown.report
        self._look_at_settings(report)
        self.model_size = report.hello.model_size
        self.progress = max(self.progress, report.progress)
        shown.steps_per_s = self._steps_per_s(before, report, now - shown.answered_at)
        shown.report, shown.answered_at, shown.why_not = report, now, ""
        if shown.member.incarnation < report.hello.me.incarnation:
            shown.member = report.hello.me
        has_restarted = self._compare(shown, before, report)
        self._settle(shown, tells=not has_restarted)

    def _look_at_settings(self, report: Report) -> None:
        """The highest epoch counts: a peer that is behind follows."""
        algorithm = report.hello.algorithm
        if not self.algorithm:
            self._log("note", "", f"the swarm trains with {report.settings or algorithm}")
        elif report.epoch > self.epoch:
            why = f": {report.changed_why}" if report.changed_why else ""
            self._log("note", "", f"the swarm now works with {report.settings or algorithm}{why}")
        elif report.epoch == self.epoch and algorithm != self.algorithm:
            name = report.hello.me.peer
            self._log("note", name, f"{name} now uses {algorithm}")
        if not self.algorithm or report.epoch >= self.epoch:
            self.algorithm, self.epoch = algorithm, report.epoch

    def failed(self, name: PeerId, why: str, now: Seconds) -> None:
        """A peer did not answer."""
        self._now = now
        shown = self.peers.get(name)
        if shown is not None:
            shown.why_not = why
            self._settle(shown, tells=True)

    def faults_are(self, active: Collection[tuple[str, str]], now: Seconds) -> None:
        """The faults that last at this moment, as pairs of kind and peer."""
        self._now = now
        for fault, begins in self.faults.see(active, self.history, self.now):
            text = f"{fault.peer}: {fault.kind} {'begins' if begins else 'ends'}"
            self._log("warn" if begins else "note", fault.peer, text)

    def tick(self, now: Seconds) -> None:
        """A second has passed."""
        self._now = now
        live = [shown for shown in self.peers.values() if shown.is_live]
        passed_s, self._ticked = max(1e-3, now - self._ticked), now
        reports = [shown.report for shown in live if shown.report]
        figures = {name: f for name, shown in self.peers.items() if (f := shown.figures())}
        point: history.Point = (
            round(self.now, 2),
            _rounded(sum(f.samples_per_s for f in figures.values())),
            _rounded(sum(s.steps_per_s for s in live if s.state != "done")),
            _rounded(history.mean([f.wait_share for f in figures.values()])),
            _rounded(history.mean([finite(report.loss) for report in reports])),
            _rounded(history.mean([finite(r.consensus_distance_l2) for r in reports])),
            _rounded(self._averages / passed_s),
            len(live),
        )
        self._averages = 0.0
        letters = "".join(
            history.letter(shown.state, shown.report.wait_share if shown.report else 0.0)
            for shown in self.peers.values()
        )
        self.history.add(point, letters)
        self._fresh_seconds.append((point, letters))
        self.faults.measure(self.history, self.now)
        self._diagnose(figures)

    # --- what is shown ----------------------------------------------------------------------------

    def snapshot(self) -> Json:
        """Everything, for a page that opens."""
        return {
            **self._head(),
            "columns": COLUMNS,
            "point": history.POINT,
            "letters": history.LETTERS,
            "rows": [row(shown) for shown in self.peers.values()],
            "history": self.history.as_json(),
            "pulses": list(self._pulses),
            "events": list(self.events),
        }

    def take_update(self) -> Json:
        """What has changed since the last call."""
        update = {
            **self._head(),
            "rows": {self.peers[name].index: row(self.peers[name]) for name in self._changed},
            "seconds": self._fresh_seconds,
            "pulses": self._fresh_pulses,
            "events": self._fresh_events,
        }
        self._changed = set()
        self._fresh_seconds, self._fresh_pulses, self._fresh_events = [], [], []
        return update

    def _head(self) -> Json:
        states = [shown.state for shown in self.peers.values()]
        return {
            "now": round(self.now, 2),
            "algorithm": self.algorithm,
            "model_size": self.model_size,
            "progress": self.progress,
            "present": sum(state not in GONE for state in states),
            "known": len(states),
            "slow": self.sentences,
            "faults": self.faults.as_json(),
        }

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, member: Member) -> Shown | None:
        if len(self.peers) >= MAX_PEERS:
            return None
        shown = self.peers[member.peer] = Shown(len(self.peers), member)
        self._changed.add(member.peer)
        return shown

    def _settle(self, shown: Shown, *, tells: bool) -> None:
        """Decide a peer's state, and log it if that is news."""
        before, shown.state = shown.state, state_of(shown)
        self._changed.add(shown.member.peer)
        if tells and before != shown.state:
            self._log_change(shown, before)

    def _log_change(self, shown: Shown, before: str) -> None:
        name, state = shown.member.peer, shown.state
        if state == "silent" and shown.report:
            self._log("bad", name, shown.report.silence)
        elif state == "no answer" and before not in GONE:
            self._log("bad", name, f"{name} does not answer: {shown.why_not}")
        elif state == "dead":
            self._log("bad", name, f"{name} is dead")
        elif state == "suspect":
            self._log("warn", name, f"{name} is suspected to be dead")
        elif state in ("left", "done"):
            self._log("note", name, f"{name} {'has left' if state == 'left' else 'is done'}")
        elif before == "silent":
            self._log("good", name, f"{name} averages again")
        elif before in (*GONE, "suspect") and state not in GONE:
            self._log("good", name, f"{name} is back")

    def _compare(self, shown: Shown, before: Report | None, report: Report) -> bool:
        """Find averages and warnings in a peer's new report; True if it has started again."""
        if before is None:
            return False
        name = report.hello.me.peer
        is_newer = report.hello.me.incarnation > before.hello.me.incarnation
        if is_newer and report.running_s < before.running_s:
            self._log("good", name, f"{name} has started again")
            return True
        if report.warning and report.warning not in (before.warning, report.silence):
            self._log("warn", name, report.warning)
        done = report.groups_done - before.groups_done
        if done > 0:
            self._meet(shown, report.partners, done)
        return False

    def _meet(self, shown: Shown, partners: Sequence[PeerId], done: int) -> None:
        known = (self.peers[partner].index for partner in partners if partner in self.peers)
        members = tuple(sorted({shown.index, *known}))
        self._averages += done / max(1, len(members))
        if len(members) < 2 or self._now - self._pulsed.get(members, -math.inf) < PULSE_S:
            return
        if len(self._pulsed) >= PULSES * 8:
            self._pulsed.clear()
        self._pulsed[members] = self._now
        pulse = (round(self.now, 2), members)
        self._pulses.append(pulse)
        if len(self._fresh_pulses) < PULSES:
            self._fresh_pulses.append(pulse)

    def _diagnose(self, figures: dict[PeerId, Figures]) -> None:
        named = {str(name): one for name, one in figures.items()}
        found = diagnosis.diagnose(named)
        self.sentences = diagnosis.sentences(found, named)
        fresh: list[PeerId] = []
        for name, shown in self.peers.items():
            slowness = found.get(name)
            if slowness != shown.slowness:
                shown.slowness = slowness
                self._changed.add(name)
            is_slow = slowness is not None and slowness.cause != "waiting"
            shown.slow_for = 0 if is_slow is shown.is_logged_slow else shown.slow_for + 1
            if shown.slow_for >= SLOW_AFTER:
                shown.is_logged_slow, shown.slow_for = is_slow, 0
                if slowness and is_slow:
                    fresh.append(name)
                elif shown.is_live and shown.state != "done":
                    self._log("good", name, f"{name} is no longer slow")
        if len(fresh) > TOGETHER:
            named_some = ", ".join(fresh[:TOGETHER])
            self._log("warn", "", f"{len(fresh)} peers are slow: {named_some} and others")
            return
        for name in fresh:
            self._log("warn", name, f"{name} {found[name].sentence}")

    def _steps_per_s(self, before: Report | None, report: Report, passed_s: Seconds) -> float:
        """Smoothed over some seconds: between two reports a slow peer makes 0 or 1 steps."""
        me = report.hello.me
        if before is None or me.steps < before.hello.me.steps or passed_s <= 0:
            per_step = me.samples / me.steps if me.steps else 0.0
            return (finite(report.samples_per_s) or 0.0) / per_step if per_step else 0.0
        shown = self.peers[me.peer]
        weight = min(1.0, passed_s / 3.0)
        rate = (me.steps - before.hello.me.steps) / passed_s
        return shown.steps_per_s + weight * (rate - shown.steps_per_s)

    def _log(self, level: Level, peer: str, text: str) -> None:
        event = (round(self.now, 1), level, str(peer), text)
        self.events.append(event)
        if len(self._fresh_events) < EVENTS:
            self._fresh_events.append(event)


def state_of(shown: Shown) -> str:
    """What a peer is, in one or two words."""
    report, member = shown.report, shown.member
    if not shown.why_not and report and member.state is not MemberState.LEFT:
        return _state_of_answering(report, member)
    if member.state >= MemberState.DEAD:
        return member.state.name.lower()
    if shown.why_not:
        return "no answer"
    if member.state is MemberState.SUSPECT:
        return "suspect"
    return OF_PHASES[member.phase] if name_at(member.address) else "new"


def _state_of_answering(report: Report, member: Member) -> str:
    match report.hello.me.phase:
        case Phase.ARRIVING:
            return "joins"
        case Phase.DONE:
            return "done"
        case Phase.TRAINING:
            if report.silence:
                return "silent"
            return "suspect" if member.state >= MemberState.SUSPECT else "trains"


def row(shown: Shown) -> list[Any]:  # Any: whatever JSON can hold
    """A peer's figures in the order of `COLUMNS`."""
    report, me = shown.report, shown.me
    live = report if shown.is_live else None
    carried = CARRIED if name_at(shown.member.address) else ""
    doing = live.doing if live else shown.why_not or carried
    return [
        me.peer,
        shown.member.address,
        shown.state,
        doing,
        me.steps,
        _rounded(shown.steps_per_s) if live else None,
        me.samples,
        _rounded(finite(live.samples_per_s)) if live else None,
        _rounded(finite(live.wait_share)) if live else None,
        _rounded(finite(report.loss)) if report else None,
        _rounded(finite(report.consensus_distance_l2)) if report else None,
        report.groups_done if report else None,
        report.groups_failed if report else None,
        list(report.partners[:4]) if report else [],
        me.link_mbit,
        shown.slowness.cause if shown.slowness else "",
        shown.slowness.sentence if shown.slowness else "",
    ]


def finite(value: float | None) -> float | None:
    """None in place of what is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    """Four digits are all that a page shows."""
    return None if value is None else float(f"{value:.4g}")
