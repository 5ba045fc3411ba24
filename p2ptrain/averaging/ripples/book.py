"""The book of Ripples' Group Generator: which groups are to average next, and which already do.

Pure bookkeeping of one generator (`generator.py` elects it). A peer *asks*, and the book returns
the groups that may run. When a group is *over*, it may return more groups.

::

               Global Division              all members unlocked                 over
      (asks) ------------------> BUFFERED ------------------------> RUNNING ------------> gone
                                 the Group Buffer                   locks its members

* **Lock vector.** The members of a running group are locked, and no other group that has one of
  them runs. A group locks all of its members at once or none, so no group holds one member while it
  waits for another.
* **Group Buffer.** A group waits in the buffer of *all* its members until it can run. A peer that
  asks and has a group in its buffer gets that one instead of a new one.
* **Global Division.** If the asking peer's buffer is empty, all peers whose buffers are empty are
  divided into groups at once. Groups of one division share no peer, so they do not wait for each
  other; groups that are drawn one by one would, and queue up.
* **Machines.** Divisions of even updates stay inside machines: each machine is one group. In those
  of odd updates one *head* of each machine meets the other heads, and the rest of a machine forms
  groups of its own, so that one peer of a machine at a time uses its link to other machines.
* **Slowdown filter.** A peer whose steps take `slowdown` times the median, or longer, is left out
  of other peers' divisions: they do not wait for it. When it asks itself it gets a group, so no
  peer is left out for good. A step is timed from the end of a peer's last group to its question,
  smoothed. (Counting how many updates a peer is behind does not work: a fast peer that waits for a
  slow one stays level with it, is drawn with it again, and trains at its pace from then on.) Where
  trainers do not wait for members, there is nothing to filter.

**With or without waiting.** Where trainers wait for their groups (`waits`), a group runs when all
of its members have asked, each at the end of its step. Otherwise it runs as soon as its members are
unlocked, whatever their trainers do. A division then takes the free peers. A free peer that is
alone gets a group with some that are still busy. So does a peer that would only meet its last group
again: of two groups that end in turns, each while the other runs, no member would meet the other's.

**Slow links.** Fragments that follow each other keep links busy, so a group lasts as long as its
slowest link takes, and its other members could have moved more. So where trainers do not wait, and
four peers or more are on no machines: groups have at most half of the peers (in groups of all of
them no link can be told from the slowest); a peer on a slow link meets one other at a time; and a
peer that would only meet its last group again does so, instead of waiting for a group on a link
that is `ALIKE` times slower. When that one is over, its members wait for the faster ones.

**No peer waits for ever.** A peer is in one buffered group at most, since only empty buffers are
divided. Take the oldest buffered group: each of its members is unlocked when the group that it runs
in is over, and no other buffered group has that member. So no group overtakes it, and a large group
comes to run like a small one. Where all must ask, each asks at its next boundary, which waits for
no group: its last one is over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from p2ptrain.core.links import ALIKE
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds

if TYPE_CHECKING:
    from p2ptrain.averaging.ripples import Ripples

FEW = 4
"""Of fewer peers there are no two groups at a time."""


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """One group that the book has made; the oldest is first."""

    number: int
    members: tuple[PeerId, ...]
    """Sorted. One member alone: there is no peer to meet, and its question is answered."""

    leader: PeerId
    """Claims it."""


class GroupBook:
    """One generator's book. Whatever happens, it returns the groups that run from then on.

    Args:
        link_mbit: what the link of a peer carries; 0: not known.
    """

    def __init__(
        self,
        config: "Ripples.Config",
        rng: Random,
        link_mbit: Callable[[PeerId], int] = lambda _: 0,
    ) -> None:
        self._config = config
        self._rng = rng
        self._link_mbit = link_mbit
        self._numbers = 0
        self._home: dict[PeerId, int] = {}  # the machine of each that is present, sorted by name
        self._asking: dict[PeerId, int] = {}  # after so many updates; in order
        self._met: dict[PeerId, tuple[PeerId, ...]] = {}  # its last group
        self._met_at: dict[PeerId, Seconds] = {}  # when that ended
        self._step_s: dict[PeerId, Seconds] = {}  # how long one of its steps takes
        self._buffered: dict[PeerId, Group] = {}  # by member
        self._running: dict[PeerId, Group] = {}  # by member: the lock vector

    @property
    def buffered(self) -> tuple[Group, ...]:
        """The groups that wait, the oldest first."""
        return tuple(sorted(set(self._buffered.values())))

    @property
    def running(self) -> tuple[Group, ...]:
        """The groups that run, the oldest first."""
        return tuple(sorted(set(self._running.values())))

    # --- what happens -----------------------------------------------------------------------------

    def keep(self, present: Sequence[PeerId], now: Seconds) -> list[Group]:
        """`present`, sorted, are the peers that train; all others are forgotten."""
        each = self._config.peers_per_machine or max(1, len(present))
        before = self._home
        self._home = {peer: place // each for place, peer in enumerate(present)}
        for peer in before:
            if peer not in self._home:
                self._forget(peer)
        return self._serve(now)

    def ask(self, peer: PeerId, updates: int, now: Seconds) -> list[Group]:
        """`peer`, which is present, wants a group after so many updates; it may get one alone."""
        if peer in self._met_at:
            took_s = now - self._met_at.pop(peer)
            self._step_s[peer] = took_s / 4 + self._step_s.get(peer, took_s) * 3 / 4
        self._asking[peer] = updates
        return self._serve(now)

    def over(self, number: int, done: bool, now: Seconds) -> list[Group]:
        """A running group has ended; if `done`, its members have what they asked for."""
        for peer in [peer for peer, group in self._running.items() if group.number == number]:
            group = self._running.pop(peer)
            if done:
                self._asking.pop(peer, None)
            if done and peer in self._home:
                self._met[peer], self._met_at[peer] = group.members, now
        return self._serve(now)

    def check(self) -> None:
        """Raise InvariantViolation if a peer is in two groups of a kind, or a group is torn."""
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

    def _serve(self, now: Seconds) -> list[Group]:
        """Give each peer that asks a group; return those that can run."""
        alone: list[Group] = []
        for peer in tuple(self._asking):
            if peer not in self._buffered and peer not in self._running:
                for members in self._divide(peer):
                    group = self._group(members)
                    self._buffered.update(dict.fromkeys(members, group))
                if peer not in self._buffered:
                    del self._asking[peer]
                    self._met_at[peer] = now
                    alone.append(self._group([peer]))
        return [*alone, *(group for group in self.buffered if self._maybe_run(group))]

    def _maybe_run(self, group: Group) -> bool:
        if any(peer in self._running for peer in group.members):
            return False
        if self._config.waits and any(peer not in self._asking for peer in group.members):
            return False
        for peer in group.members:
            self._running[peer] = self._buffered.pop(peer)
        return True

    def _forget(self, peer: PeerId) -> None:
        """`peer` is not here any more: a group that waits goes without it, one that it leads ends.

        Of one that runs the leader will hear that it is lost, and say so.
        """
        for told in (self._asking, self._met, self._met_at, self._step_s):
            told.pop(peer, None)
        running = self._running.items()
        self._running = {member: group for member, group in running if group.leader != peer}
        if buffered := self._buffered.get(peer):
            for member in buffered.members:
                del self._buffered[member]
            left = tuple(member for member in buffered.members if member != peer)
            if len(left) > 1:
                group = replace(buffered, members=left, leader=left[0])
                self._buffered.update(dict.fromkeys(left, group))

    # --- Global Division --------------------------------------------------------------------------

    def _divide(self, asker: PeerId) -> list[list[PeerId]]:
        """Divide all whose buffers are empty into groups; no peer to meet: none with `asker`."""
        pool = [peer for peer in self._home if peer not in self._buffered]
        if self._config.waits:
            pool = [peer for peer in pool if peer == asker or self._keeps_up(peer)]
        free = [peer for peer in pool if self._config.waits or peer not in self._running]
        busy = [peer for peer in pool if peer not in free]
        one_machine = not any(self._home.values())
        crosses = not one_machine and self._asking[asker] % 2 == 1
        groups = self._draw(free, crosses, whole_machines=not (crosses or one_machine))
        if crosses or one_machine:
            last = self._met.get(asker, ())
            others = [peer for peer in busy if peer not in last]
            again = [part for part in groups if asker in part and all(p in last for p in part)]
            if again and self._sees_links:
                others = [peer for peer in others if not self._is_held_up(peer, again[0])]
            if others and again:
                groups.remove(again[0])
                groups.append([asker, *self._some(others, asker)])
        if busy and not any(asker in part for part in groups):
            mates = [peer for peer in busy if self._home[peer] == self._home[asker]]
            groups.append([asker, *self._some(mates or busy, asker)])
        return groups

    @property
    def _sees_links(self) -> bool:
        config = self._config
        follows = config.fragment_s and not config.waits
        return bool(follows and not config.peers_per_machine and len(self._home) >= FEW)

    @property
    def _size(self) -> int:
        size = self._config.size
        return min(size, len(self._home) // 2) if self._sees_links else size

    def _is_slow(self, peer: PeerId) -> bool:
        """Whether its link is known to carry much less than most others."""
        usual = [mbit for other in self._home if (mbit := self._link_mbit(other))]
        own = self._link_mbit(peer) if self._sees_links else 0
        return own > 0 and own * ALIKE <= median_high(usual)

    def _is_held_up(self, peer: PeerId, members: Sequence[PeerId]) -> bool:
        """Whether the group that runs with `peer` is on a much slower link than these have."""
        theirs, ours = self._least_mbit(self._running[peer].members), self._least_mbit(members)
        return theirs > 0 and theirs * ALIKE <= ours

    def _least_mbit(self, members: Sequence[PeerId]) -> int:
        return min((mbit for peer in members if (mbit := self._link_mbit(peer))), default=0)

    def _keeps_up(self, peer: PeerId) -> bool:
        """True also if we do not know."""
        own_s = self._step_s.get(peer)
        return own_s is None or own_s <= self._config.slowdown * median_low(self._step_s.values())

    def _draw(
        self, free: Sequence[PeerId], crosses: bool, *, whole_machines: bool
    ) -> list[list[PeerId]]:
        """Groups inside machines; if it `crosses`, also of one head of each machine.

        A machine that already has a peer in a group with other machines has no other head.
        """
        inside: dict[int, list[PeerId]] = {}
        for peer in self._rng.sample(free, len(free)):
            inside.setdefault(self._home[peer], []).append(peer)
        made = [self._machines(group.members) for group in (*self.buffered, *self.running)]
        away = [machine for machines in made if len(machines) > 1 for machine in machines]
        out = [machine for machine in inside if crosses and machine not in away]
        heads = [inside[machine].pop() for machine in out] if len(out) > 1 else []
        size = len(free) if whole_machines else self._size
        parts = [part for peers in (heads, *inside.values()) for part in self._cut(peers, size)]
        return [part for part in parts if len(part) > 1]

    def _cut(self, peers: Sequence[PeerId], size: int) -> list[list[PeerId]]:
        """Cut into groups of `size`, and pairs with a peer on a slow link."""
        rest, pairs = list(peers), []
        for slow in filter(self._is_slow, peers):
            if slow in rest and len(rest) > 1:
                rest.remove(slow)
                pairs.append([slow, rest.pop()])
        return pairs + shares(rest, size)

    def _machines(self, members: Sequence[PeerId]) -> set[int]:
        return {self._home[peer] for peer in members if peer in self._home}

    def _some(self, busy: Sequence[PeerId], asker: PeerId) -> list[PeerId]:
        most = 1 if self._is_slow(asker) else self._size - 1
        return self._rng.sample(busy, min(most, len(busy)))

    def _group(self, members: Sequence[PeerId]) -> Group:
        self._numbers += 1
        return Group(self._numbers, tuple(sorted(members)), self._rng.choice(members))


def shares(peers: Sequence[PeerId], size: int) -> list[list[PeerId]]:
    """Cut into groups of `size`, or a little more where that leaves a rest; fewer are one group."""
    count = max(1, len(peers) // max(1, size))
    cuts = [len(peers) * index // count for index in range(count + 1)]
    return [list(peers[start:stop]) for start, stop in pairwise(cuts)]
