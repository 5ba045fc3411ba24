"""Parameter server: peers push updates to servers and get parameters (Li et al., OSDI 2014).

The model is cut into as many parts as there are servers; a server is a peer that trains, too. What
a peer does after each step depends on `sync`:

* ``bsp``: all wait for each other. Each server adds up everyone's gradients of its part and hands
  the mean out; all make the same update:  g <- sum of n_i g_i / sum of n_i,  x <- x - lr update(g)
* ``asp``: none waits for another one. A peer sends what it has trained, u, and gets the parameters
  as they are then:  p <- p + u / P,  x <- p
* ``ssp`` (Ho et al., NeurIPS 2013): the same, but a peer that has made `gap` steps more than the
  slowest one waits for it.

With one server everything goes through its link: P - 1 models in each direction per step. With as
many servers as peers, ``bsp`` moves what `allreduce` moves. This is the baseline that Ripples and
eager-SGD were measured against.

As built here, and why:

* *Servers are the first peers by name*; with fewer peers than `servers` some have several parts.
  They train, too, and go on serving when they are done. None is special: the next succeeds.
* *A server may only serve*: give a peer ``trains = false``, and a name that comes first. A loop of
  your own is then ``while not peer.should_stop: peer.step(samples=0)``, with the learning rate and
  the clipping of all others. Under ``bsp`` it takes part in each average with 0 samples, else it is
  done from the start. It waits for the first peer that trains, ends with the last one, and waits a
  minute for one that crashed. One more of them than `servers` is a spare, and the successor. After
  a change to ``bsp`` those that were done stay done.
* *All replicas make the update under* ``bsp``, from means of the servers, which have no optimizer.
  It is the same update, optimizers of all kinds work, and a server that dies takes nothing along:
  the group repeats its average without it. Chunks are pipelined: means of the first numbers go out
  while the last ones come in.
* *A P-th of an update counts* under ``asp`` and ``ssp`` (`share`), so that a learning rate means
  what it means under ``bsp``, where the mean of P gradients is applied. With `share` = 1 a step of
  all peers moves the model P times as far.
* *A server's death* under ``asp`` and ``ssp`` is survived by what the living have got; lost is what
  it trained itself since its last answer to one of them (`runtime/parameters.py`).
* *The first server counts clocks.* A peer says how many steps it has made, and hears how many the
  slowest one has. A successor knows no clocks and asks for them; until all have answered or are
  dead none goes on. A newcomer counts on from the slowest, also if it is the first server itself;
  so does a peer that was taken for dead while the others went on. A clock names the life that it
  is of: what an earlier one said may come late. What is lost is said again, so it costs time and
  no step too many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.averaging import (
    Algorithm,
    AlgorithmMessage,
    ConfigError,
    PeerId,
    RemoteProtocolError,
    Seconds,
    Swarm,
)

ASK_S: Seconds = 0.4
"""A peer that waits says its clock again after so long."""

PULL_S: Seconds = 0.5
"""How often a peer that is done gets the parameters while others train."""

MOST_SERVERS = 1 << 10

MOST_CLOCK = 1 << 61
"""Steps and lives; more can be counted on from it, and be said."""

CLOCK, SLOWEST = "clock", "slowest"
"""A peer's steps, the slowest that it has heard of, and which life it says so in; the answer: steps
of the slowest, what the first step of a newcomer counts as, and the life that it is said to."""

ASK, REPLY = "ask", "reply"
"""The first server asks for a clock; the reply is as `CLOCK`, and is not answered."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What one peer has said of its clock."""

    clock: int
    slowest: int
    life: int


class ParameterServer(Algorithm):
    trainer_waits = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Who waits for whom, and how many servers there are."""

        sync: Literal["bsp", "ssp", "asp"] = "bsp"
        """``bsp``: all make each step together. ``ssp``: none is more than `gap` steps ahead.
        ``asp``: none waits."""

        servers: int = 1
        """Parts of the model, each with a server. Too few: their links are the bottleneck; more
        than peers: some have several."""

        gap: int = 3
        """Under ``ssp``: a peer begins no step when it is more than so many ahead of the slowest.
        Too small: as ``bsp``; too large: updates are of old parameters."""

        share: float = 0
        """Under ``asp`` and ``ssp``: how much of an update counts, up to 1; 0: one in as many as
        there are peers that train. Too large: peers overtake each other, and training diverges."""

        def __post_init__(self) -> None:
            if not 1 <= self.servers <= MOST_SERVERS:
                raise ConfigError(
                    f"parameter_server servers = {self.servers} must be from 1 to {MOST_SERVERS}"
                )
            if self.sync not in ("bsp", "ssp", "asp"):
                raise ConfigError(
                    f"parameter_server sync = {self.sync!r}; there are: bsp, ssp, asp"
                )
            if self.gap < 0:
                raise ConfigError(f"parameter_server gap = {self.gap} must be 0 or more")
            if not 0 <= self.share <= 1:
                raise ConfigError(f"parameter_server share = {self.share} must be from 0 to 1")

    clock = 0
    """Steps, as servers count them; 0 before the first one."""
    slowest = 0
    """Clock of the slowest peer, as far as this one has heard."""
    _start = 0  # our first step counts as this one; 0: the first server has not said yet
    _asked_at: Seconds = -ASK_S

    def __init__(self, config: "ParameterServer.Config | None" = None) -> None:
        super().__init__(config)
        self._said: dict[PeerId, _Said] = {}  # as the first server: of others

    @property
    def averages(self) -> str:  # type: ignore[override]
        """Gradients at a barrier, or models."""
        return "gradients" if self.config.sync == "bsp" else "models"

    @property
    def in_step(self) -> bool:
        return bool(self.config.sync == "bsp")

    @property
    def conserves_mean(self) -> bool:
        """Where models differ, servers decide."""
        return self.in_step

    def servers(self, peers: Sequence[PeerId]) -> Sequence[PeerId]:
        return [peers[part % len(peers)] for part in range(self.config.servers)]

    def acts(self, moment: str) -> bool:
        """Under `bsp` after the backward pass, else after the update."""
        other = "after_update" if self.in_step else "after_backward"
        return moment != other and super().acts(moment)

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()

    async def after_update(self, swarm: Swarm) -> None:
        await self._exchange(swarm)
        if self.config.sync == "ssp":
            await self._keep_to_gap(swarm)

    async def background(self, swarm: Swarm) -> None:
        """A peer that is done gets what the others train, and once more when they are done."""
        were_others = True
        while not self.in_step:
            await swarm.wait_for_change(PULL_S)
            if swarm.trains:
                continue
            are_others = any(peer != swarm.me for peer in swarm.participants())
            if are_others or were_others:
                await self._exchange(swarm)
            were_others = are_others
            await swarm.pause(PULL_S)

    async def _exchange(self, swarm: Swarm) -> None:
        here = sorted([swarm.me, *swarm.alive()])  # one that is done goes on serving
        if len(here) > 1:
            share = self.config.share or 1 / len(swarm.trainees())
            await swarm.exchange_updates(self.servers(here), share)

    async def _keep_to_gap(self, swarm: Swarm) -> None:
        """Count this step, and wait for the slowest peer if it is too far behind."""
        if self.clock == 0:
            await self._say_clock_until(swarm, lambda: self._start > 0)
            self.clock = max(0, self._start - 1)
        self.clock += 1
        self._say_clock(swarm)
        await self._say_clock_until(swarm, lambda: self._is_near(swarm))

    def _is_near(self, swarm: Swarm) -> bool:
        """Whether the next step may begin."""
        counts = swarm.trainees()[0] == swarm.me
        slowest = self._slowest_of(swarm) if counts else self.slowest
        return self.clock <= slowest + int(self.config.gap)

    async def _say_clock_until(self, swarm: Swarm, is_over: Callable[[], bool]) -> None:
        counts, said_at = None, swarm.now
        while swarm.trains and not is_over():
            first = swarm.trainees()[0]
            if first != counts or swarm.now >= said_at + ASK_S:
                self._say_clock(swarm)
                counts, said_at = first, swarm.now
            if not is_over():
                await swarm.wait_for_change(ASK_S)

    def _say_clock(self, swarm: Swarm) -> None:
        counts = swarm.trainees()[0]
        if counts == swarm.me:
            self._count(swarm, swarm.me, _Said(*self._numbers(swarm)))
        else:  # lost: said again after the next step, or by one that waits
            self._said.clear()  # if we count again, it may be of earlier lives
            swarm.tell(counts, AlgorithmMessage(CLOCK, self._numbers(swarm)))

    def _numbers(self, swarm: Swarm) -> tuple[int, int, int]:
        return self.clock, self.slowest, swarm.incarnation

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        if max(message.numbers, default=0) > MOST_CLOCK:
            raise RemoteProtocolError(f"{source} says {message}, which is no clock")
        match message:
            case AlgorithmMessage(kind="clock" | "reply", numbers=(clock, slowest, life), peers=()):
                if swarm.trainees()[0] == swarm.me:
                    self._count(swarm, source, _Said(clock, slowest, life))
                    if message.kind == CLOCK:
                        self._tell(swarm, source)
            case AlgorithmMessage(kind="ask", numbers=(), peers=()):
                # Lost: it asks again.
                swarm.tell(source, AlgorithmMessage(REPLY, self._numbers(swarm)))
            case AlgorithmMessage(kind="slowest", numbers=(slowest, start, life), peers=()):
                if source == swarm.trainees()[0] and life == swarm.incarnation:
                    self.slowest, self._start = max(self.slowest, slowest), start
                    if 0 < self.clock < start:  # they have gone on without us
                        self.clock = start
                        self._say_clock(swarm)
            case _:
                raise RemoteProtocolError(f"{source} says {message}, which is no clock")

    # --- the first server -------------------------------------------------------------------------

    def _count(self, swarm: Swarm, peer: PeerId, said: _Said) -> None:
        """Take in a clock, and tell those whom it lets go on."""
        before, known = self._slowest_of(swarm), self._said.get(peer)
        is_new = known is None or (said.life, said.clock) >= (known.life, known.clock)
        if is_new and peer != swarm.me:
            self._said[peer] = said
        here = swarm.participants()  # suspects count until they are dead
        self._said = {one: what for one, what in self._said.items() if one in here}
        if swarm.now >= self._asked_at + ASK_S:
            for one in self._unheard(swarm):
                self._asked_at = swarm.now
                swarm.tell(one, AlgorithmMessage(ASK))
        self._start = self._start_of_newcomers(swarm)
        if 0 < self.clock < self._start:  # they have gone on without us
            self.clock = self._start
        slowest = self._slowest_of(swarm)
        self.slowest = max(self.slowest, slowest)
        for other, what in self._said.items() if slowest > before else ():
            if other != peer and what.clock - before > self.config.gap:
                self._tell(swarm, other)

    def _tell(self, swarm: Swarm, peer: PeerId) -> None:
        if said := self._said.get(peer):  # lost: it says its clock again
            numbers = self._slowest_of(swarm), self._start_of_newcomers(swarm), said.life
            swarm.tell(peer, AlgorithmMessage(SLOWEST, numbers))

    def _unheard(self, swarm: Swarm) -> list[PeerId]:
        """Those that train, or are suspect and may train, and have not said their clocks."""
        suspects = {*swarm.participants()} - {*swarm.alive()}
        here = sorted({*swarm.trainees(), *suspects} - {swarm.me})
        return [peer for peer in here if peer not in self._said]

    def _slowest_of(self, swarm: Swarm) -> int:
        """Of all that train; 0 if one of them has said nothing."""
        clocks = [self.clock, *(said.clock for said in self._said.values())]
        return 0 if self._unheard(swarm) else min(clocks)

    def _start_of_newcomers(self, swarm: Swarm) -> int:
        """What a first step counts as: 1 until all have made theirs; 0: not known yet.

        Others may be `gap` ahead of the slowest that they have heard of, and of no newcomer more.
        """
        if self._unheard(swarm):
            return 0
        heard = max([self.slowest, *(said.slowest for said in self._said.values())])
        clocks = [self.clock, *(said.clock for said in self._said.values())]
        return max(heard, min((clock for clock in clocks if clock), default=0)) if heard else 1
