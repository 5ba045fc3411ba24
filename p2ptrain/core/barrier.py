"""Barriers: everyone who trains meets once per version.

Who meets follows from the view, and when, from the version; what peers need is agreement on both
while others come and go. The coordinator (`core/scheduled.py`) requests the group when it has an
`Arrive` of every participant. A slow peer may compute for long: no peer is promised while it does,
and a dead one is taken off the list by membership.

::

             arrive(v)               Begin(ticket, v)                 done: version v ended
      IDLE -----------> WAITING(v) --------------------> IN_GROUP ---------------------------> IDLE
                          ^  |  ^                            | broken: arrive again
                          |  |  +----------------------------+
          state of w held |  | CatchUp(w > v)
                          |  v
                        CATCHING_UP(w)

**After a break** some members may have finished version v and others not. Those who have will
arrive with v + 1, those who have not with v, and the coordinator, which waits for all, sees both:
it sends the ones behind to take the state (parameters *and* optimizer) of one that is ahead,
which stands still at its boundary because it waits at this very barrier. A newcomer is the same
case, only further behind. So peers that average together are equal. Each time that it cannot have
the state it is sent to another donor; one that can have it of none in bounded time leaves
(`runtime/state_transfer.py`), since all others wait for it.

**Two models.** Two parts of a swarm that cannot hear each other go on apart, each with its own
averages, and may come to the same version with two models. So each arrival states its *lineage*: 64
bits that follow from the first model and each average that went into it
(`runtime/agreed_state.py`). A group has one version and one lineage; where the newest version has
several, members of another lineage than most take the state of one of those, as members behind do.

**No cycle of waits**: participants wait for the coordinator's word, the coordinator for arrivals,
and an arrival needs nothing but the trainer's own step (or, catching up, the state of a peer that
is waiting).

**A coordinator that forms nothing** though all have arrived (it hangs, or refuses for a reason that
no other peer knows of) stops no peer: one that has waited for `DEPUTY_S` tells the next
participant by name as well, and that one requests the group when it has heard of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.core.effects import Average, Outcome, Send, TakeState, VersionEnded
from p2ptrain.core.messages import Arrive, BarrierMessage, CatchUp
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.scheduled import Arrival, Scheduled
from p2ptrain.errors import InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds

DEPUTY_S: Seconds = 2.0
"""A peer that has waited for so long tells the deputy too."""


@dataclass(eq=False)
class Barrier(Scheduled):
    """One peer's share of the barriers; `_view()` is who meets."""

    _taking: tuple[TakeState, tuple[int, int]] | None = field(default=None, init=False)
    """We catch up; the version and lineage we wait with again if the state cannot be had."""
    _next_donors: dict[PeerId, int] = field(default_factory=dict, init=False)
    """As the coordinator: which donor a peer is sent to if it comes again without the state."""

    @property
    def state(self) -> Arrival | TakeState | Average | None:
        """What our trainer waits for; None: it computes."""
        return self._taking[0] if self._taking else self.arrival or self.group

    def waits_with(self, version: int, lineage: int) -> bool:
        """True while our trainer stands at that boundary: others may take its state."""
        arrival = self.arrival
        return arrival is not None and (arrival.version, arrival.lineage) == (version, lineage)

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        return self.waits_with(purpose.version, purpose.lineage)

    def arrive(self, version: int, lineage: int, now: Seconds) -> None:
        """The trainer waits with `version` of `lineage`; it ends in `VersionEnded`."""
        if self.state:
            raise LocalProtocolError(f"{self._me} arrives with {version} but is {self.state}")
        self._wait(version, lineage, now)

    def release(self) -> None:
        """Our trainer goes on, although its group is not over; it will not arrive with it again."""
        if self.group:
            self.group = replace(self.group, awaited=False)

    def withdraw(self, now: Seconds) -> None:
        super().withdraw(now)
        if self._taking:
            (version, _), self._taking = self._taking[1], None
            self._emit(VersionEnded(version, Outcome.WITHDRAWN))

    def receive(self, source: PeerId, message: BarrierMessage, now: Seconds) -> None:
        match message:
            case Arrive(version=version, lineage=lineage, offer=offer, contribution=contribution):
                purpose = barrier_of(version, lineage, self.epoch)
                if not offer or self._lock.note_offer(source, offer, purpose, contribution):
                    self._arrivals[source] = version, lineage
                    self._maybe_run(now)
            case CatchUp(version=version, donor=donor, lineage=lineage):
                ours = self.arrival
                if ours and version >= ours.version and not self.waits_with(version, lineage):
                    self._catch_up(version, donor, lineage, now)

    def formed(self, average: Average) -> Average:
        average, arrival = replace(average, awaited=True), self.arrival
        if arrival and average.purpose == self._purpose_of(arrival):
            self.arrival, self.group = None, average
            self._arrivals.clear()
            self._next_donors.clear()
            self._lock.stop_offering()
        return average

    def state_transferred(self, version: int, now: Seconds, *, taken: bool) -> None:
        """We hold the state that we were sent for, or it cannot be had."""
        if self._taking and self._taking[0].version == version:
            state, behind = self._taking
            self._taking = None
            self._wait(*((version, state.lineage) if taken else behind), now)

    def check(self) -> None:
        super().check()
        if sum(map(bool, (self.arrival, self._taking, self.group))) > 1:
            raise InvariantViolation(f"{self._me} waits for several things: {vars(self)}")

    # --- the participant's side -------------------------------------------------------------------

    def _wait(self, version: int, lineage: int, now: Seconds) -> None:
        if self._withdrawn:
            self._emit(VersionEnded(version, Outcome.WITHDRAWN))
            return
        resend_at, deputy_at = now + self._resend_s, now + DEPUTY_S
        self.arrival = Arrival(version, resend_at, lineage, deputy_at=deputy_at)
        self._tell(now)
        self._maybe_run(now)

    def _meets(self, arrival: Arrival) -> tuple[Sequence[PeerId], Purpose, Arrive]:
        words = Arrive(arrival.version, arrival.lineage)
        return self._view(), self._purpose_of(arrival), words

    def _purpose_of(self, arrival: Arrival) -> Purpose:
        return barrier_of(arrival.version, arrival.lineage, self.epoch)

    def _left(self, group: Average, outcome: Outcome, now: Seconds) -> None:
        if outcome is Outcome.DONE or not group.awaited:
            self._emit(VersionEnded(group.purpose.version, outcome))
        else:
            self._wait(group.purpose.version, group.purpose.lineage, now)

    def _catch_up(self, version: int, donor: PeerId, lineage: int, now: Seconds) -> None:
        arrival, self.arrival = self.arrival, None
        assert arrival is not None
        state = TakeState(version, donor, lineage)
        self._taking = state, (arrival.version, arrival.lineage)
        self._lock.withdraw_offer(now)
        self._emit(state)

    # --- the coordinator's side -------------------------------------------------------------------

    def _maybe_run(self, now: Seconds) -> None:
        """If we coordinate and everyone waits: let those behind catch up, or form the group."""
        arrival = self.arrival
        if not arrival or self._requested:
            return
        participants = tuple(self._view())
        is_deputy = now >= arrival.deputy_at and self._me in participants[:2]
        if participants[0] != self._me and not is_deputy:
            return
        arrivals = {**self._arrivals, self._me: (arrival.version, arrival.lineage)}
        if any(peer not in arrivals for peer in participants):
            return
        newest = max(arrivals[peer] for peer in participants)[0]
        models = [arrivals[peer] for peer in participants if arrivals[peer][0] == newest]
        # The lineage that most have; of equals the first one's.
        version, lineage = goal = max(models, key=models.count)
        donors = [peer for peer in participants if arrivals[peer] == goal]
        others = [peer for peer in participants if arrivals[peer] != goal]
        for peer in others:
            # In turn, as one may have no room for its state.
            turn = self._next_donors.get(peer, 0) % len(donors)
            donor, self._next_donors[peer] = donors[turn], (turn + 1) % len(donors)
            if peer == self._me:
                self._catch_up(version, donor, lineage, now)
            else:  # lost: its `Arrive` brings it
                del self._arrivals[peer]
                self._emit(Send(peer, CatchUp(version, donor, lineage)))
        if not others:
            members = [peer for peer in participants if peer != self._me]
            purpose = barrier_of(version, lineage, self.epoch)
            ticket = self._lock.request(members, len(members), now, purpose)
            self._requested = ticket, version

    def _refused(self, version: int, now: Seconds) -> None:
        self._arrivals.clear()  # somebody waits for something else: all will say so again


def barrier_of(version: int, lineage: int, epoch: int = 0) -> Purpose:
    """What peers that wait with this version and lineage wait for."""
    return Purpose(Formation.BARRIER, What.GRADIENTS, version, lineage, epoch=epoch)
