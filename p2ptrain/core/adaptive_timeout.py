"""Adapt the timeouts of failure detection to observed answer times and to this peer's own health.

* `doubt` (Lifeguard's local health multiplier) counts signs that *this* peer is at fault: a probe
  that failed although no helper confirms it, a timer that fired late, a suspicion of itself that it
  refuted. Each answer in time takes one away. All timeouts towards others stretch with it, since
  most false suspicions come from an accuser that is overloaded, paused or cut off.
* A suspicion without other accusers has the longest timeout; each member that could not reach the
  suspect either shortens it, down to the minimum.
* Both scale with the observed answer times (`core/deadlines.py`): where answers take twice as long
  as configured, every timeout here doubles, so their nesting stays as checked at the start.

Source: Lifeguard (Dadgar, Phillips, Currey, DSN 2018).
"""

import math
from dataclasses import dataclass

from p2ptrain.core.deadlines import Deadline
from p2ptrain.errors import ConfigError, check_above_0
from p2ptrain.ids import Seconds

LEAST_PROBE_BYTES = 256

LEAST_VIEW, MOST_VIEW = 16, 1024
"""Fewer: a swarm falls apart when a part of it dies; more: as many records as one peer can keep of
everyone."""

MOST_DOUBT = 4
"""At most, a peer waits five times as long as a healthy one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Deadlines of failure detection, and whom a peer knows."""

    probe_period_s: Seconds = 0.25
    """Between two probes by one peer. Too short: bytes and wake-ups; too long: late suspicion."""

    ack_timeout_s: Seconds = 0.5
    """After this time without an ack indirect probes begin; after twice this time the target is
    suspect. The minimum: it adapts where answers take longer. Too short: a busy machine is
    suspected (and refutes); too long: a vanished peer is still chosen."""

    ack_timeout_most_s: Seconds = 2.0
    """The maximum of the adapted timeout. Too short: peers on slow links are suspected again and
    again; too long: a swarm of stragglers notices no death."""

    suspicion_s: Seconds = 1.5
    """Time to refute for a suspect with several accusers. Too short: a paused peer must rejoin
    groups; too long: a synchronous group waits for the dead."""

    suspicion_most_s: Seconds = 5.0
    """The same with a single accuser. Too short: one peer with a bad connection breaks groups; too
    long: a small part of a partitioned swarm waits for the large one."""

    relays: int = 3
    """Helpers per unanswered probe. Too few: one broken path makes suspects; too many: needless
    messages."""

    probe_bytes: int = 1024
    """The byte budget for records in one ping or ack. Too small: updates spread slowly; too large:
    bandwidth."""

    view: int = 0
    """How many of the others a peer chooses to know; about as many choose it. 0: it knows everyone,
    which thousands of peers are too many for. For gossip on random graphs, with `peers` as the size
    of the swarm. Too small: the dead are found out late; too large: memory and messages."""

    def __post_init__(self) -> None:
        check_above_0("membership", self, "probe_period_s", "ack_timeout_s", "ack_timeout_most_s")
        check_above_0("membership", self, "suspicion_s", "suspicion_most_s")
        if self.relays < 0:
            raise ConfigError(f"membership relays = {self.relays} must be 0 or more")
        if self.probe_bytes < LEAST_PROBE_BYTES:
            raise ConfigError(
                f"membership probe_bytes = {self.probe_bytes} must be {LEAST_PROBE_BYTES} or more: "
                "the sender's record, the receiver's, and one to spread"
            )
        if self.view and not LEAST_VIEW <= self.view <= MOST_VIEW:
            raise ConfigError(
                f"membership view = {self.view} must be from {LEAST_VIEW} to {MOST_VIEW}, or 0: "
                "each peer knows everyone"
            )
        for kind in ("ack_timeout", "suspicion"):
            least, most = f"{kind}_s", f"{kind}_most_s"
            low, high = getattr(self, least), getattr(self, most)
            if low > high:
                raise ConfigError(
                    f"membership {least} = {low} must be at most {most} = {high}: "
                    f"raise {most} or lower {least}"
                )
        if self.ack_timeout_s >= self.suspicion_s:
            raise ConfigError(
                f"membership ack_timeout_s = {self.ack_timeout_s} must be below "
                f"suspicion_s = {self.suspicion_s}, or a suspect is dead before it can answer"
            )


class AdaptiveTimeout:
    def __init__(self, config: MembershipConfig) -> None:
        self.doubt = 0
        """0: no sign that this peer is at fault."""
        self._config = config
        least_s = config.ack_timeout_s
        self._answers = Deadline(least_s, config.ack_timeout_most_s, first_s=least_s)

    @property
    def answer_s(self) -> Seconds:
        """The timeout for a request that is sent now."""
        return self._answers.seconds * (1 + self.doubt)

    def suspicion_s(self, accusers: int, needed: int) -> Seconds:
        """How long a suspect may take to refute; from `needed` accusers on it is the minimum."""
        share = 1.0 if accusers >= needed else math.log(accusers) / math.log(needed)
        longest, least = self._config.suspicion_most_s, self._config.suspicion_s
        scale = self._answers.seconds / self._config.ack_timeout_s
        return (longest - share * (longest - least)) * scale

    def answered(self, after_s: Seconds, *, in_time: bool) -> None:
        self._answers.took(after_s)
        if in_time:
            self.doubt = max(0, self.doubt - 1)

    def blame_ourselves(self) -> None:
        self.doubt = min(MOST_DOUBT, self.doubt + 1)
