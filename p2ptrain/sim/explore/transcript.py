"""Print a path through situations in words: one line for each step, with what it changes."""

from collections import Counter
from collections.abc import Iterator

from p2ptrain.core.effects import Outcome
from p2ptrain.sim.explore.peers import (
    Asks,
    CatchesUp,
    Ends,
    HearsDead,
    HearsDone,
    Meets,
    Sent,
    Visits,
    Wakes,
    say,
)
from p2ptrain.sim.explore.scenario import Ticks
from p2ptrain.sim.explore.situations import NOTHING, Kind, Situations, Step, Unsafe


def transcript(
    situations: Situations, path: tuple[int, ...], turn: int | None = None
) -> Iterator[str]:
    """The steps of `path`; then, if `turn` is given, that fair continuation until it ends."""
    root, *choices = path
    key = situations.roots()[root]
    ticks: Ticks = 0
    yield f"clocks run at {situations.words(key)[2].rates} seconds per tick"
    for choice in choices:
        step = list(situations.steps(key))[choice]
        yield f"{ticks:>4}  {_say(situations, key, step)}"
        if isinstance(step, Unsafe):
            yield f"      UNSAFE: {step.why}"
            return
        key, ticks = step.after, ticks + step.ticks
    if turn is not None:
        yield "      no more faults, no more requests:"
        yield from _fair_transcript(situations, key, ticks, turn)


def _fair_transcript(situations: Situations, key: bytes, ticks: Ticks, turn: int) -> Iterator[str]:
    seen = dict[bytes, None]()
    while key not in seen:
        seen[key] = None
        step = fair_step(situations, key, turn)
        if step is None or (step.kind >= Kind.TIMER and not situations.unfinished(key)):
            yield f"      {situations.unfinished(key) or 'everyone is free'}"
            return
        yield f"{ticks:>4}  {_say(situations, key, step)}"
        key, ticks = step.after, ticks + step.ticks
    yield "      and so on, for ever"


def fair_step(situations: Situations, key: bytes, turn: int) -> Step | None:
    """The next step of a fair continuation: the first (0) or last (1) of the earliest kind."""
    steps = [s for s in situations.steps(key) if isinstance(s, Step) and s.kind is not Kind.MAY]
    kind = min((step.kind for step in steps), default=Kind.MAY)
    return next((step for step in steps[:: -1 if turn else 1] if step.kind is kind), None)


def _say(situations: Situations, key: bytes, step: Step | Unsafe) -> str:
    said = _event(situations, step)
    if isinstance(step, Unsafe):
        return said
    before, wire, _ = situations.words(key)
    after, new_wire, _ = situations.words(step.after)
    changes = [
        f"{name} {now}"
        for name, was, now in zip(situations.peers.names, before, after, strict=True)
        if was != now
    ]
    sent = [f"sends {message}" for message in (Counter(new_wire) - Counter(wire)).elements()]
    return f"{said:<48} {'; '.join(changes + sent)}".rstrip()


def _event(situations: Situations, step: Step | Unsafe) -> str:
    if step.peer == NOTHING:
        return f"{step.event} ticks pass"
    name = situations.peers.names[step.peer]
    if step.event == NOTHING:
        return f"{name} {step.verb}"
    match situations.peers.events.values[step.event]:
        case Sent() as sent:
            return f"{say(sent, situations.peers.names)} {step.verb}"
        case Asks(number=number):
            return str(situations.scenario.asks[number])
        case Ends(ticket=ticket, outcome=outcome):
            how = "is done" if outcome is Outcome.DONE else "breaks"
            return f"{name}'s average in {ticket} {how}"
        case HearsDead(other=other):
            return f"{name} hears that {situations.peers.names[other]} is gone"
        case HearsDone(other=other):
            return f"{name} hears that {situations.peers.names[other]}'s trainer has ended"
        case Meets(version=version):
            return f"{name}'s trainer arrives at the barrier with {version}"
        case Visits(version=version, waits=waits):
            how = "waits for" if waits else "passes"
            return f"{name}'s trainer {how} version {version}"
        case CatchesUp(version=version, taken=taken):
            return f"{name} {'has taken' if taken else 'cannot take'} the state of {version}"
        case Wakes():
            return f"{name}'s timers fire"
