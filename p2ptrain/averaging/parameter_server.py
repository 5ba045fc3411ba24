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
  slowest one has. A successor knows no clocks; it counts a peer that it has not heard of as the
  slowest, and those that wait say theirs again. A newcomer counts on from the slowest. What is lost
  is said again, so it costs time and no step too many.
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

CLOCK, SLOWEST = "clock", "slowest"
"""Steps of the one that says so; of the slowest peer, and of the slowest that is known."""


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
        there are peers. Too large: peers overtake each other, and training diverges."""

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
    _known_slowest = -1  # of those that the counting server knows; -1: it has not said yet

    def __init__(self, config: "ParameterServer.Config | None" = None) -> None:
        super().__init__(config)
        self._clocks: dict[PeerId, int] = {}  # as the first server

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
        """A peer that is done gets what the others train, until they are done, too."""
        are_others = True
        while not self.in_step and are_others:
            await swarm.wait_for_change(PULL_S)
            if not swarm.trains:
                are_others = any(peer != swarm.me for peer in swarm.trainees())
                await self._exchange(swarm)
                await swarm.pause(PULL_S if are_others else 0)

    async def _exchange(self, swarm: Swarm) -> None:
        here = sorted([swarm.me, *swarm.alive()])  # one that is done goes on serving
        if len(here) > 1:
            share = self.config.share or 1 / len(here)
            await swarm.exchange_updates(self.servers(here), share)

    async def _keep_to_gap(self, swarm: Swarm) -> None:
        """Count this step, and wait for the slowest peer if it is too far behind."""
        if len(swarm.trainees()) > 1 and self.clock == 0:
            await self._say_clock_until(swarm, lambda: self._known_slowest >= 0)
            if self._known_slowest > self.config.gap + 1:  # else we begin with the others
                self.clock = self._known_slowest - 1
        self.clock += 1
        self._say_clock(swarm)
        await self._say_clock_until(swarm, lambda: self.clock - self.slowest <= self.config.gap)

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
            self._note(swarm, swarm.me, self.clock)
        else:  # lost: said again after the next step, or by one that waits
            swarm.tell(counts, AlgorithmMessage(CLOCK, (self.clock,)))

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        match message:
            case AlgorithmMessage(kind="clock", numbers=(clock,), peers=()):
                self._note(swarm, source, clock)
                if swarm.trainees()[0] == swarm.me:
                    self._tell(swarm, source)
            case AlgorithmMessage(kind="slowest", numbers=(slowest, known), peers=()):
                if source == swarm.trainees()[0]:
                    self.slowest, self._known_slowest = max(self.slowest, slowest), known
            case _:
                raise RemoteProtocolError(f"{source} says {message}, which is no clock")

    def _note(self, swarm: Swarm, peer: PeerId, clock: int) -> None:
        """As the first server: hear a clock, and tell those whom it lets go on."""
        before = self._of_slowest(swarm)[0]
        # A peer that begins says 0: what an earlier life of it has said does not count.
        self._clocks[peer] = max(clock, self._clocks.get(peer, 0)) if clock else 0
        here = {swarm.me, *swarm.participants()}  # suspects count until they are dead
        self._clocks = {one: at for one, at in self._clocks.items() if one in here}
        slowest, known = self._of_slowest(swarm)
        if peer == swarm.me or swarm.trainees()[0] == swarm.me:
            self.slowest, self._known_slowest = max(self.slowest, slowest), known
        if slowest > before and swarm.trainees()[0] == swarm.me:
            for other, at in self._clocks.items():
                if other not in (swarm.me, peer) and at - before > self.config.gap:
                    self._tell(swarm, other)

    def _tell(self, swarm: Swarm, peer: PeerId) -> None:
        swarm.tell(peer, AlgorithmMessage(SLOWEST, self._of_slowest(swarm)))  # lost: it asks again

    def _of_slowest(self, swarm: Swarm) -> tuple[int, int]:
        """Of all that train, 0 if one of them has said nothing; and of those that have."""
        here, alive = {swarm.me, *swarm.participants()}, set(swarm.alive())
        suspects = here - alive  # one that a successor has not heard is at work, unless it is dead
        known = [at for peer, at in self._clocks.items() if peer in here]
        clocks = [*(self._clocks.get(peer, 0) for peer in {*swarm.trainees(), *suspects}), *known]
        return min(clocks), min((clock for clock in clocks if clock), default=0)
