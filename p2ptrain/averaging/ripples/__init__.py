"""Ripples, later Prague: Partial All-Reduce (Luo et al., arXiv 1909.08029; ASPLOS 2020).

All-reduce is fast among equal peers, and as slow as the slowest among unequal ones. Gossip in pairs
tolerates slow peers, at the price of an exchange per pair. **Partial All-Reduce** is between them:
a group G of any size averages its models as all-reduce would, without the other peers:

    x_i  <-  x_i - lr * update(g_i)
    x_i  <-  (1 / |G|) * sum of x_j over G, for all i in G

Groups that share a peer do not commute and run one after the other, so groups should be chosen
that do not conflict. `schedule` is one of three ways to choose:

* `"static"`: a table of four steps, known to all peers, for machines with several peers each (as in
  the authors' own code). With four peers to a machine, of local rank l = 0, 1, 2, 3:

      step 0   all l = 0 across machines; {2, 3} in each machine; l = 1 alone
      step 1   each machine
      step 2   all l = 1 across machines; {0, 3} in each machine; l = 2 alone
      step 3   each machine

  So one peer of a machine at a time uses the link to other machines, in every second step only.
* `"generator"`: one peer, the **Group Generator**, keeps a lock for each peer and a **Group
  Buffer**. Where that is empty it divides all peers into groups at once, **Group Division**
  (`book.py`). Here it is elected, and when it dies another takes its place (`generator.py`).
* `"decentral"`: without proposals. A peer that has made an update and has not been in a group since
  takes the first free peers, through the group lock.

Differences from the paper, and why:

* *Trainers do not wait* (`waits = False`). Groups average beside the trainers, in delta form: an
  update that is made meanwhile is kept, and a slow trainer delays no other. With `waits = True` a
  trainer stands still until its group is done, and a group until all its trainers have arrived.
* *A slowdown filter only where trainers wait.* A peer whose steps take long is then left out of
  other peers' divisions. Where trainers do not wait, leaving it out would save nothing, and its
  model would become older.
* *Any number* of peers, and of peers on a machine, in the table too.
* *A slow link slows one other peer at a time* where fragments follow each other (`fragment_s`), so
  that groups on fast links do not wait for it (`book.py`).
* *The generator only proposes.* Every member grants its own slot, through the group lock, so two
  generators at a time waste time and break nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.averaging import (
    NOBODY,
    Algorithm,
    AlgorithmMessage,
    ConfigError,
    Outcome,
    PeerId,
    RemoteProtocolError,
    Round,
    Rule,
    Swarm,
    What,
    check_fragment,
    in_turn,
)
from p2ptrain.averaging.ripples.generator import GroupGenerator

DEFAULT_GROUP = 3
PUBLISHED_MACHINE = 4
"""Peers on a machine in the published table."""


class Ripples(Algorithm):
    averages = "models"
    state_names = ("turns",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How groups are chosen, how large they are, and whether trainers wait for them."""

        schedule: Literal["generator", "static", "decentral"] = "generator"
        """``generator``, ``static`` or ``decentral``; see above."""

        group_size: int = 0
        """Peers per drawn group, up to twice as many less one where the peers do not divide; 0:
        three. Too small: models drift apart; too large: more peers must be free at once, and each
        average moves more. It does not apply to groups of the table, or of a whole machine.
        """

        peers_per_machine: int = 0
        """This many consecutive peers, by name, share one machine's link to the others. Half of the
        groups then stay inside machines, and in the other half one peer of each machine meets the
        others. 0: machines make no difference; the table takes four, as published. Too large:
        groups that are meant to stay inside a machine do not."""

        waits: bool = False
        """Whether a trainer stands still until its group is done. If not, averages run beside it
        and reach its model one step later."""

        slowdown: float = 1.5
        """With `waits` and a generator: a peer whose steps take this many times the median is not
        drawn into other peers' groups. Too small: peers that are slow by chance are left out, too;
        too large: all peers wait for slow ones."""

        fragment_s: float = 0
        """Of groups that are drawn or claimed: each moves a fragment of the model, as large as
        links carry in about so many seconds, and the next one another, at once where trainers do
        not wait; 0: the whole model. Too small: messages cost more than numbers; too large: means
        are of old numbers. Groups of the table move whole models. Where trainers do not wait, a
        generator's groups have at most half of the peers, and a peer on a slow link meets one at a
        time, unless there are fewer than four peers or `peers_per_machine` is given."""

        def __post_init__(self) -> None:
            check_fragment("ripples", self.fragment_s)
            if self.group_size < 0 or self.group_size == 1:
                raise ConfigError(
                    f"ripples group_size = {self.group_size} must be 2 or more, or 0 for three"
                )
            if self.peers_per_machine < 0:
                raise ConfigError(
                    f"ripples peers_per_machine = {self.peers_per_machine} must be 1 or more, or 0 "
                    "if machines make no difference"
                )
            if not 1 < self.slowdown < math.inf:
                raise ConfigError(f"ripples slowdown = {self.slowdown} must be above 1")

        @property
        def size(self) -> int:
            return self.group_size or DEFAULT_GROUP

    turns = 0
    """Averages that we began."""
    _groups = 0  # that we had been in when the last one ended, in this life
    _rounds = 0  # in which all numbers were averaged, then
    _generator: GroupGenerator | None = None

    async def background(self, swarm: Swarm) -> None:
        if self.config.schedule == "generator":
            swarm.start(self._generator_of(swarm).run())
        await super().background(swarm)

    async def after_update(self, swarm: Swarm) -> None:
        """Average in the group of this update, unless somebody else's choice had us in one.

        Fragments follow each other, until each number was averaged once since the last time.
        """
        self.turns += 1
        if self.config.schedule == "static":
            self.turns = max(self.turns, swarm.version)  # a newcomer falls in with the others
            if (await swarm.form_at(self.turns)).outcome is Outcome.LATE:
                # Members that train much faster are past every version that we come to by counting.
                self.turns = swarm.version + 1
                await swarm.form_at(self.turns)
        elif self.config.fragment_s and not self.config.waits:
            more = True
            while more and swarm.rounds == self._rounds:  # a fragment follows the other
                more = await self._take_turn(swarm) and swarm.trains
        elif self.config.waits or swarm.met().get(swarm.me, 0) == self._groups:
            await self._take_turn(swarm)
        self._groups, self._rounds = swarm.met().get(swarm.me, 0), swarm.rounds

    async def _take_turn(self, swarm: Swarm) -> bool:
        """Average in one group; returns whether there was one."""
        before = swarm.met().get(swarm.me, 0)
        if self.config.schedule == "generator":
            await self._generator_of(swarm).take_turn()
        else:
            await self._take_who_is_free(swarm)
        return swarm.met().get(swarm.me, 0) != before

    # --- static -----------------------------------------------------------------------------------

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        each = self.config.peers_per_machine or PUBLISHED_MACHINE
        table = static_groups(version, len(peers), each)
        group = next(group for group in table if peers.index(me) in group)
        members = tuple(peers[rank] for rank in group)
        rule = Rule(waiting=len(members)) if self.config.waits else NOBODY
        return Round(members, What.MODELS, rule)

    # --- generator --------------------------------------------------------------------------------

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        if self.config.schedule != "generator":
            raise RemoteProtocolError(f"{source} has groups proposed, and we do not")
        self._generator_of(swarm).receive(source, message)

    def _generator_of(self, swarm: Swarm) -> GroupGenerator:
        """This peer's share of the generator, made when it is needed first."""
        if self._generator is None:
            self._generator = GroupGenerator(swarm, self.config)
        return self._generator

    # --- decentral --------------------------------------------------------------------------------

    async def _take_who_is_free(self, swarm: Swarm) -> None:
        """Claim a group with the first that are free of those that we met longest ago."""
        everyone = sorted((swarm.me, *swarm.choosable()))
        each = self.config.peers_per_machine or len(everyone)
        candidates, count = circle(self.turns, everyone, swarm.me, each, self.config.size)
        if order := in_turn(candidates, swarm.met(), swarm.rng):
            order = order[: max(count, -(-len(order) // 2))]
            await swarm.form(order, count, fragment_s=self.config.fragment_s)

    # --- all --------------------------------------------------------------------------------------

    def check_swarm(self, peers: int) -> None:
        for name in ("group_size", "peers_per_machine"):
            if (value := getattr(self.config, name)) > peers:
                raise ConfigError(
                    f"ripples {name} = {value} is more than the {peers} peers of the swarm; make "
                    "it smaller, or 0"
                )


def static_groups(step: int, count: int, each: int) -> tuple[tuple[int, ...], ...]:
    """The table's groups of places 0 ... `count` - 1 at `step`, `each` to a machine; a partition.

    Period 4. At odd steps each machine is a group. At even ones the heads of all machines are, the
    place after a head is alone, and the rest of its machine is a group; where that would leave one
    alone more, the two are a pair.
    """
    ranks = [tuple(range(start, min(start + each, count))) for start in range(0, count, each)]
    if step % 2 == 1:
        return tuple(ranks)
    heads: list[int] = []
    groups: list[tuple[int, ...]] = []
    for machine in ranks:
        first = step // 2 % min(2, len(machine))
        heads.append(machine[first])
        rest = machine[first + 1 :] + machine[:first]
        alone = rest[:1] if len(rest) > 2 else ()
        groups += [group for group in (alone, tuple(sorted(rest[len(alone) :]))) if group]
    return (tuple(heads), *groups)


def circle(
    turn: int, everyone: Sequence[PeerId], me: PeerId, each: int, size: int
) -> tuple[tuple[PeerId, ...], int]:
    """Whom `me` may take at its `turn`, and how many of them.

    Those on its own machine, all at even turns and `size` - 1 at odd ones; but in one odd turn of
    as many as there are peers on its machine, it is its machine's head and takes others' peers.
    """
    first = everyone.index(me) // each * each
    mine = everyone[first : first + each]
    mates = tuple(peer for peer in mine if peer != me)
    others = tuple(peer for peer in everyone if peer not in mine)
    leads = turn % 2 == 1 and turn // 2 % len(mine) == mine.index(me)
    if others and (leads or not mates):
        return others, min(size - 1, len(others))
    inside = len(mates) if others and turn % 2 == 0 else min(size - 1, len(mates))
    return mates, max(1, inside)
