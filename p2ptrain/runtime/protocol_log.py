"""Log what a peer sends, receives and decides, one line each: clock, peer, ticket, event.

The words are those of the simulator's trace, which shows some (`sim/trace.py`), and `t` is the
clock that governs the peer. The logger `p2ptrain.protocol` is off until its level is set: INFO
shows groups, DEBUG the probes of membership as well. While it is off, nothing is formatted.
"""

import logging
from collections.abc import Callable
from typing import Any

from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.epochs import count_of
from p2ptrain.core.messages import AnyMessage, MembershipMessage
from p2ptrain.ids import PeerId, Seconds

LOG = logging.getLogger("p2ptrain.protocol")
LOG.setLevel(logging.WARNING)  # or a program that logs at INFO would get a flood


def show(*, probes: bool) -> None:
    """Print the lines on standard error, as ``p2ptrain peer -v`` does; with `probes` as ``-vv``."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.propagate = False
    LOG.setLevel(logging.DEBUG if probes else logging.INFO)


class ProtocolLog:
    """One peer's lines; implements `Metrics` for what its records tell."""

    def __init__(self, me: PeerId, clock: Callable[[], Seconds]) -> None:
        self._me = me
        self._clock = clock

    def message(self, arrow: str, peer: PeerId, message: AnyMessage) -> None:
        """A message goes out (``->``) or has come (``<-``)."""
        level = logging.DEBUG if isinstance(message, MembershipMessage) else logging.INFO
        if LOG.isEnabledFor(level):
            self._write(level, f"{arrow} {peer} {said(message)}")

    def decided(self, effect: Effect) -> None:
        """The machine asks for this; messages and members have lines of their own."""
        if LOG.isEnabledFor(logging.INFO) and not isinstance(effect, Send | MemberChanged):
            self._write(logging.INFO, decision(effect))

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        if LOG.isEnabledFor(logging.INFO) and (line := recorded(self._me, kind, fields)):
            self._write(logging.INFO, line)

    def _write(self, level: int, what: str) -> None:
        LOG.log(level, "t=%.3fs %s %s", self._clock(), self._me, what)


def said(message: AnyMessage) -> str:
    """A message in few words: what it is, and of which ticket, version, number or kind."""
    for field in ("ticket", "version", "number", "kind"):
        value = getattr(message, field, None)
        if value is not None:
            return f"{type(message).__name__} {value}"
    return type(message).__name__


def decision(effect: Effect) -> str:
    """An effect in few words: of which ticket or version, what it is, with whom, and why."""
    version = getattr(effect, "version", None)
    others = ",".join(getattr(effect, "members", ())) or getattr(effect, "donor", "")
    why = getattr(effect, "why", "")
    parts = (
        str(getattr(effect, "ticket", "")) or ("" if version is None else f"version {version}"),
        type(effect).__name__,
        getattr(effect, "outcome", ""),
        f"with {others}" if others else "",
    )
    return " ".join(filter(None, parts)) + (f": {why}" if why else "")


def recorded(me: PeerId, kind: str, fields: dict[str, Any]) -> str:  # Any: as above
    """A record of `me` in few words; empty for those that are no decision of the protocol's."""
    match kind:
        case "settings":
            count = count_of(fields["epoch"])
            return f"change {count}: {fields['settings']}, as {fields['by']} says: {fields['why']}"
        case "group":
            others = ",".join(name for name in fields["members"] if name != me)
            lasted = f"after {fields['exchange_s']:.6f}s"
            return f"{fields['ticket']} {fields['outcome']} with {others} {lasted}"
        case "member" if fields["state"] != "alive":
            return f"thinks {fields['member']} {fields['state']}"
        case "warning" if "silent" in fields:
            return f"warns: {fields['text']}"
        case _:
            return ""
