"""The book of Ripples' Group Generator: who is to average with whom next, and who is already at it.

Pure bookkeeping of one generator (`generator.py` says who that is). Peers *ask*, groups
come out; when a group is *over* the book hears of it, and perhaps more groups come out.

::

               Global Division              all members unlocked                 over
      (asks) ------------------> BUFFERED ------------------------> RUNNING ------------> gone
                                 the Group Buffer                   locks its members

* **Lock vector.** The members of a running group are locked, and no other group that has one of
  them runs. A group takes all of its members at once or none, so nobody holds one while waiting for
  another.
* **Group Buffer.** A group waits in the buffer of *all* its members until it can run. A peer that
  asks and has a group in its buffer gets that one instead of a new one.
* **Global Division.** If the asking peer's buffer is empty, all peers whose buffers are empty are
  divided into groups at once. Groups of one division share nobody, so they do not wait for each
  other; groups that are drawn one by one do, and queue up.
* **Machines.** Divisions of even updates stay inside machines: each is one group. In those of odd
  updates one *head* of each machine meets the other heads, and the rest of a machine meet among
  themselves, so that one peer of a machine at a time uses its way to the others.
* **Slowdown filter.** Who takes `slowdown` times as long for a step as the median peer, or longer,
  is left out of other peers' divisions: they do not wait for it. When it asks itself, it gets a
  group all the same, so nobody is left out for good. A step is timed from the end of a peer's last
  group to its question, smoothed. (Counting who is how many updates behind whom does not do: a fast
  peer that waits for a slow one stays level with it, is drawn with it again, and trains at its pace
  from then on.) Where members need not be waited for, there is nothing to filter.

**With or without waiting.** Where trainers wait for their groups (`waits`), a group runs when all
of its members have asked, each at the end of its step. Otherwise it runs as soon as its members are
unlocked, wherever their trainers are; a division then takes those that are free, and who is alone
among them gets a group with some that are not yet. So does who would only meet its last group
again: of two groups that end in turns, each while the other runs, nobody would meet anybody else.

**Nobody waits for ever.** A peer is in one buffered group at most, since only empty buffers are
divided. Look at the oldest buffered group: each of its members is unlocked when the group that it
runs in is over, and no other buffered group has that member, so none can overtake, and a large
group comes to run like a small one. Where all must ask, each does at its next boundary, which waits
for no group: its last one is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds


@dataclass(frozen=True, slots=True)
class Group:
    """One group that the book has made."""

    number: int
    members: tuple[PeerId, ...]
    """Sorted. One member alone: nobody is there to meet, and its question is answered."""

    leader: PeerId
    """Claims it."""

    crosses: bool = False
    """Its members are on different machines."""


class GroupBook:
    """One generator's book.

    Args:
        group_size: members of a group that is not a whole machine; up to twice as many less one
            where the peers do not divide.
        peers_per_machine: consecutive peers by name; 0: machines make no difference.
        slowdown: a peer that takes so many times as long for a step as the median is not waited
            for.
        waits: whether groups wait until all members have asked.
    """

    def __init__(
        self,
        *,
        group_size: int,
        peers_per_machine: int = 0,
        slowdown: float = 1.5,
        waits: bool = False,
    ) -> None:
        self._size = group_size
        self._per_machine = peers_per_machine
        self._slowdown = slowdown
        self._waits = waits
        self._numbers = 0
        self._asking: dict[PeerId, None] = {}  # in order
        self._level: dict[PeerId, int] = {}  # updates, counted as if all had begun together
        self._began_at: dict[PeerId, int] = {}
        self._met: dict[PeerId, tuple[PeerId, ...]] = {}  # its last group
        self._met_at: dict[PeerId, Seconds] = {}  # when that ended
        self._step_s: dict[PeerId, Seconds] = {}  # how long one of its steps takes
        self._buffered: dict[PeerId, Group] = {}  # by member
        self._running: dict[PeerId, Group] = {}  # by member: the lock vector

    @property
    def buffered(self) -> tuple[Group, ...]:
        """The groups that wait, the oldest first."""
        return _distinct(self._buffered)

    @property
    def running(self) -> tuple[Group, ...]:
        """The groups that run, the oldest first."""
        return _distinct(self._running)

    # --- what happens -----------------------------------------------------------------------------

    def ask(
        self, peer: PeerId, updates: int, present: Sequence[PeerId], rng: Random, now: Seconds
    ) -> list[Group]:
        """`peer`, after so many updates, wants a group; `present` is who trains, sorted.

        Returns:
            The groups that run from now on, and perhaps one of `peer` alone.
        """
        self._note(peer, updates, now)
        self._asking[peer] = None
        return self._serve(present, rng, now)

    def over(
        self, number: int, done: bool, present: Sequence[PeerId], rng: Random, now: Seconds
    ) -> list[Group]:
        """A running group has ended; if `done`, its members have what they asked for.

        Returns:
            The groups that run from now on.
        """
        for group in self.running:
            if group.number == number:
                self._end(group, done, now)
        return self._serve(present, rng, now)

    def keep(self, present: Sequence[PeerId], rng: Random, now: Seconds) -> list[Group]:
        """Forget all who are not `present`; returns the groups that run from now on."""
        here = dict.fromkeys(present)
        known = (*self._level, *self._met_at, *self._buffered, *self._running)
        for peer in dict.fromkeys(known):
            if peer not in here:
                self._forget(peer, now)
        return self._serve(present, rng, now)

    def check(self) -> None:
        """Raise InvariantViolation if somebody is in two groups of a kind, or a group is torn."""
        for groups in (self.buffered, self.running):
            members = [peer for group in groups for peer in group.members]
            if len(dict.fromkeys(members)) != len(members) or any(
                len(group.members) < 2 or group.leader not in group.members for group in groups
            ):
                raise InvariantViolation(f"an unsound book: {groups}")
        for group in self.running:
            if any(self._running.get(peer) != group for peer in group.members):
                raise InvariantViolation(f"{group} runs and has not locked all of its members")

    # --- inside -----------------------------------------------------------------------------------

    def _note(self, peer: PeerId, updates: int, now: Seconds) -> None:
        """Who asks for the first time is as far as the furthest: it is no laggard."""
        if peer not in self._began_at:
            self._began_at[peer] = max(self._level.values(), default=updates) - updates
        self._level[peer] = max(updates + self._began_at[peer], self._level.get(peer, 0))
        if peer in self._met_at:
            took_s = now - self._met_at.pop(peer)
            self._step_s[peer] = took_s / 4 + self._step_s.get(peer, took_s) * 3 / 4

    def _serve(self, present: Sequence[PeerId], rng: Random, now: Seconds) -> list[Group]:
        """Give everyone who asks a group; return those that can run."""
        alone: list[Group] = []
        for peer in tuple(self._asking):
            if peer not in self._buffered and peer not in self._running:
                groups = self._divide(peer, present, rng)
                for group in groups:
                    self._buffered.update(dict.fromkeys(group.members, group))
                if peer not in self._buffered:
                    del self._asking[peer]
                    self._met_at[peer] = now
                    alone.append(Group(self._next_number(), (peer,), peer))
        return [*alone, *(group for group in self.buffered if self._maybe_run(group))]

    def _maybe_run(self, group: Group) -> bool:
        if any(peer in self._running for peer in group.members):
            return False
        if self._waits and any(peer not in self._asking for peer in group.members):
            return False
        for peer in group.members:
            del self._buffered[peer]
            self._running[peer] = group
        return True

    def _end(self, group: Group, done: bool, now: Seconds) -> None:
        for peer in group.members:
            self._running.pop(peer, None)
            if done:
                self._asking.pop(peer, None)
                self._met[peer] = group.members
                self._met_at[peer] = now

    def _forget(self, peer: PeerId, now: Seconds) -> None:
        """`peer` is not here any more: a group that waits goes without it, one that it leads ends.

        Of one that runs the leader will hear that it is lost, and say so.
        """
        self._asking.pop(peer, None)
        self._level.pop(peer, None)
        self._began_at.pop(peer, None)
        self._met.pop(peer, None)
        self._met_at.pop(peer, None)
        self._step_s.pop(peer, None)
        running, buffered = self._running.get(peer), self._buffered.pop(peer, None)
        if running and running.leader == peer:
            self._end(running, False, now)
        if buffered:
            left = tuple(other for other in buffered.members if other != peer)
            for other in left:
                del self._buffered[other]
            if len(left) > 1:
                group = Group(buffered.number, left, left[0], buffered.crosses)
                self._buffered.update(dict.fromkeys(left, group))

    # --- Global Division --------------------------------------------------------------------------

    def _divide(self, asker: PeerId, present: Sequence[PeerId], rng: Random) -> list[Group]:
        """Divide all whose buffers are empty into groups; nobody to meet: none with `asker`."""
        pool = [peer for peer in present if peer not in self._buffered]
        if self._waits:
            pool = [peer for peer in pool if peer == asker or self._keeps_up(peer)]
        free = [peer for peer in pool if self._waits or peer not in self._running]
        everyone = machines(present, self._per_machine or len(present))
        home = {peer: number for number, machine in enumerate(everyone) for peer in machine}
        crossing = len(everyone) > 1 and self._level[asker] % 2 == 1
        if crossing:
            heads = self._heads(free, home, rng)
            others = [peer for peer in free if peer not in heads]
            parts = [*shares(heads, self._size), *self._by_machine(others, home, self._size, rng)]
        elif len(everyone) > 1:
            heads = []
            parts = self._by_machine(free, home, len(free), rng)
        else:
            heads = []
            parts = shares(rng.sample(free, len(free)), self._size)
        groups = [part for part in parts if len(part) > 1]
        busy = [peer for peer in pool if peer not in free]
        if crossing or len(everyone) == 1:
            others = [peer for peer in busy if peer not in self._met.get(asker, ())]
            again = [part for part in groups if asker in part and self._have_met(asker, part)]
            if others and again:
                groups.remove(again[0])
                groups.append([asker, *self._some(others, rng)])
        if not any(asker in part for part in groups):
            mates = [peer for peer in busy if home.get(peer) == home.get(asker)]
            groups.append([asker, *self._some(mates or busy, rng)])
        return [self._group(part, home, rng) for part in groups if len(part) > 1]

    def _have_met(self, peer: PeerId, part: Sequence[PeerId]) -> bool:
        """True if its last group had all of them."""
        last = self._met.get(peer, ())
        return all(other in last for other in part)

    def _keeps_up(self, peer: PeerId) -> bool:
        """True also if we do not know."""
        known = sorted(self._step_s.values())
        slow_s = self._slowdown * known[(len(known) - 1) // 2] if known else 0.0
        return peer not in self._step_s or self._step_s[peer] <= slow_s

    def _heads(self, free: Sequence[PeerId], home: dict[PeerId, int], rng: Random) -> list[PeerId]:
        """One of each machine that has nobody in a group with other machines already."""
        crossing = [group for group in (*self.buffered, *self.running) if group.crosses]
        away = {home[peer] for group in crossing for peer in group.members if peer in home}
        first: dict[int, PeerId] = {}
        for peer in rng.sample(free, len(free)):
            if home[peer] not in away:
                first.setdefault(home[peer], peer)
        return list(first.values()) if len(first) > 1 else []

    def _by_machine(
        self, free: Sequence[PeerId], home: dict[PeerId, int], size: int, rng: Random
    ) -> list[list[PeerId]]:
        """Groups of about `size` inside machines."""
        inside: dict[int, list[PeerId]] = {}
        for peer in rng.sample(free, len(free)):
            inside.setdefault(home[peer], []).append(peer)
        return [part for mates in inside.values() for part in shares(mates, size)]

    def _some(self, busy: Sequence[PeerId], rng: Random) -> list[PeerId]:
        return rng.sample(busy, min(self._size - 1, len(busy)))

    def _group(self, members: Sequence[PeerId], home: dict[PeerId, int], rng: Random) -> Group:
        on = dict.fromkeys(home.get(peer) for peer in members)
        leader = rng.choice(members)
        return Group(self._next_number(), tuple(sorted(members)), leader, len(on) > 1)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


def machines(peers: Sequence[PeerId], each: int) -> tuple[tuple[PeerId, ...], ...]:
    """The peers of each machine, `each` consecutive ones; the last one may have fewer."""
    return tuple(tuple(peers[start : start + each]) for start in range(0, len(peers), each))


def shares(peers: Sequence[PeerId], size: int) -> list[list[PeerId]]:
    """Cut into groups of `size`, or a little more where that leaves a rest; fewer are one group."""
    count = max(1, len(peers) // max(1, size))
    cuts = [len(peers) * index // count for index in range(count + 1)]
    return [list(peers[start:stop]) for start, stop in pairwise(cuts)]


def _distinct(groups: dict[PeerId, Group]) -> tuple[Group, ...]:
    by_number = {group.number: group for group in groups.values()}
    return tuple(by_number[number] for number in sorted(by_number))
