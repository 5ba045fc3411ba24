"""WAGMA-SGD: wait-avoiding group model averaging (Li et al., TPDS 2021).

Each peer trains on its own and averages models in groups of S, which change with every version, so
that an update reaches all peers in log_S P versions. Every `tau` versions all peers average:

    x_i  <-  x_i - lr * update(g_i)
    x_i  <-  (1 / S) * sum of x_j, over the group of this version

No peer waits for a slow one: the first peer that arrives starts the version for its whole group,
and each member contributes its latest model, whatever its trainer does (`core/wait_avoiding.py`).

**Butterfly groups.** Write a peer's rank (by name, among P = 2^k) in binary. Version t groups the
peers whose ranks differ only in m = log2 S of the k bits: bits (t m + r) mod k for r < m.
(The paper prints a mask that is shifted in place, under which 8 peers in fours end in groups of
two; its example and this file do what is meant.) Any other number of peers shares 2^k slots, k =
log2 P rounded down, with one or two neighbours per slot: groups have S slots, so S to 2 S peers,
and k / m versions still reach all peers.

Differences from the paper, and why:

* *Delta form* (`late = "delta"`). Each member adds mean - snapshot to its live model, so a late
  member loses nothing, and averaging does not move the mean of all models. Under the paper's rule
  (`late = "paper"`) a late peer adds its model to the mean that it missed, as one more model:
  x <- (S * mean + x) / (S + 1). That moves the mean of all, which only `sync = "step"` repairs
  (measured, a small GPT, one of 4 peers four times slower: a loss of 2.88 instead of 2.73).
* *Elastic synchronisation* (`sync = "elastic"`). In the paper every peer makes `tau` steps between
  two global averages and waits there, so that one slow peer slows all (`sync = "step"`). Here the
  global average runs like any other version: a slow peer contributes the steps that it has made.
  Versions then count averages, not own steps: a peer whose version others ran takes the next.
  Measured (simulated `quality_digits`, three seeds, one of 4 peers four times slower, equal
  samples): 3.2 times as fast, at an accuracy of 0.973 where the paper's rule has 0.972.
* *Only the group is activated*, not all peers: S - 1 small messages instead of P - 1. A group in
  which no peer has arrived does not run, and its next version takes what its members have then.
* *Fewer words.* Groups reduce and gather shards: 2 n (S - 1) / S words instead of n log2 S.
* *Behind the trainer* (`waits = False`). Groups average beside the training loop; what a trainer
  adds meanwhile is kept, and the mean arrives as a delta at its next boundary. A peer makes as many
  versions as its links can carry, and all its steps at full speed.
* *Fragments* (as Streaming DiLoCo has them, arXiv 2501.18512). With `fragments = F` each version
  averages one of F parts of the model, in turn; groups change, and all peers meet, once per round
  of F versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Literal

from p2ptrain.averaging import Algorithm, ConfigError, Group, Mean, PeerId, Round, Rule, Swarm, What


class Wagma(Algorithm):
    averages = "models"
    state_names = ("seen",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How large groups are, and how their models stay close."""

        group_size: int = 0
        """Peers per group, a power of two; 0: the one nearest to the square root of their number.
        Too small: models drift apart between two synchronisations; too large: each version moves
        more and waits for more peers' transfers. A swarm of fewer peers is one group."""

        tau: int = 10
        """Every `tau` versions all peers average. Too small: as all-reduce, at every step; too
        large: models drift apart."""

        sync: Literal["elastic", "step"] = "elastic"
        """``elastic``: no peer waits for a slow one, which contributes the steps that it has.
        ``step``: as in the paper, all make `tau` steps and wait; so one slow peer slows all.
        """

        late: Literal["delta", "paper"] = "delta"
        """What a peer does with a mean that was taken before it arrived. ``delta``: adds its own
        delta, so nothing is lost. ``paper``: counts its model as one more model."""

        waits: bool = True
        """Whether a trainer stands still while its group averages. Not: means are some steps old
        where links are slow, and all steps are made at full speed."""

        fragments: int = 1
        """Parts of the model, of which each version averages one, in turn. More: a group is on the
        link for a shorter time, and each number is averaged in fewer versions."""

        def __post_init__(self) -> None:
            size = self.group_size
            if size < 0 or size == 1 or size & (size - 1):
                raise ConfigError(
                    f"wagma group_size = {size} must be a power of two from 2 on, or 0 for the one "
                    "nearest to the square root of the number of peers"
                )
            for name in ("tau", "fragments"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"wagma {name} = {getattr(self, name)} must be 1 or more")
            for name, value in (("sync", "step"), ("late", "paper")):
                if not self.waits and getattr(self, name) == value:
                    raise ConfigError(
                        f"wagma {name} = {value!r} is a rule for trainers that wait; leave it out, "
                        "or waits = False"
                    )

    seen = 0
    """The version that our last step ended with."""
    _missed: tuple[Mean, int] | None = None  # the last mean, and of how many

    @property
    def conserves_mean(self) -> bool:
        """Not by the paper's rule for late peers."""
        return bool(self.config.late == "delta")

    async def after_update(self, swarm: Swarm) -> None:
        ran, tau, version = swarm.version, self.config.tau, self.seen + 1
        synchronised = self._round_of(ran) // tau > self._round_of(self.seen) // tau
        elastic = self.config.sync == "elastic"
        if elastic or synchronised:  # if not elastic, we are new here
            version = max(version, ran)
        if version > swarm.version or self.config.late == "paper":
            await swarm.form_at(version)  # a late one waits for what still runs, if anything
        if self._missed:  # by the paper's rule, the model counts as one more in that mean
            (mean, size), self._missed = self._missed, None
            await mean.add(size / (size + 1))
        self.seen = max(version, swarm.version) if elastic else version

    async def average(self, group: Group) -> None:
        if self.config.late == "paper" and not group.awaited:
            self._missed = await group.keep(), len(group.members)
        else:
            await super().average(group)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        config, rule = self.config, Rule()
        members, turn = tuple(peers), self._round_of(version)
        if turn % config.tau == 0:
            rule = rule if config.sync == "elastic" else Rule(len(peers))
        else:
            size = config.group_size or default_group_size(len(peers))
            rank = peers.index(me)
            group = next(g for g in butterfly(turn, len(peers), size) if rank in g)
            members = tuple(peers[p] for p in group)
        fragment = (version - 1) % config.fragments
        return Round(members, What.MODELS, rule, fragment, config.fragments)

    def _round_of(self, version: int) -> int:
        """The how-manieth time, from 1 on, each number is averaged; 0 before the first."""
        return (version - 1) // int(self.config.fragments) + 1

    def check_swarm(self, peers: int) -> None:
        if self.config.group_size > peers:
            raise ConfigError(
                f"wagma group_size = {self.config.group_size} is more than the {peers} peers of "
                "the swarm; make it smaller, or 0 to fit"
            )


def default_group_size(count: int) -> int:
    """The power of two nearest to the square root of `count`, and at least 2."""
    return min((1 << k for k in range(1, 32)), key=lambda size: abs(size - sqrt(count)))


@lru_cache(maxsize=256)  # every peer of a simulated world asks for the same groups
def butterfly(version: int, count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The groups of places 0 ... `count` - 1 at `version`, each sorted; a partition."""
    slots = 1 << _log2(count)
    bits = range(_log2(slots))
    joined = {(version * _log2(size) + r) % len(bits) for r in range(min(_log2(size), len(bits)))}
    mask = sum(1 << bit for bit in bits if bit not in joined)
    groups: dict[int, list[int]] = {}
    for rank in range(count):
        slot = rank * slots // count
        groups.setdefault(slot & mask, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def _log2(number: int) -> int:
    """Rounded down."""
    return number.bit_length() - 1
