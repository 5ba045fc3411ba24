"""SGP: stochastic gradient push on directed graphs (Assran et al., ICML 2019).

After each update a peer sends half of its model to one peer, and takes in what another one sends.
With a weight w beside each model z (push-sum), half of both travels:

    z  <-  z - lr * update(g)
    send (w / 2, z) to the peer 2^k ranks further;  w <- w / 2
    of what came, (w', z'):  z <- (w z + w' z') / (w + w'),  w <- w + w'

So no peer needs the consent of another one: there is no lock, no group, and no cycle of waits. The
graph is drawn anew at each round, k = round mod log2 P: an update reaches all P peers in log2 P
rounds. Weights tell how much of all models each one stands for, whatever arrives late or not at
all; the sums of all w and of all w z, with what is on the way, stay the same (`runtime/shares.py`).

Differences from the paper, and why:

* *The model that is trained is z*, and its update counts with the peer's weight. In the paper the
  update is made to w z, so that a peer of small weight makes larger steps. In step all weights are
  1 and both are the same. A share that comes before its round adds to the weight early, so where
  steps are unequal updates count more, as under a larger learning rate (simulated, one of 4 peers
  four times slower: 1.5 times on average; steps of 50 to 400 ms in turn: 1.3 times).
* *What is lost comes back.* A share that certainly never arrived is taken in again by its sender.
  One that may have arrived at a peer which has died goes with that peer. (In the released code a
  failed exchange is signalled by a weight of -1, and both sides start again.)
* *Any number of peers*, which may join and leave: ranks are by name, among all that train. A
  newcomer takes a model over and has weight 1. Those who leave take their weight along.
* *Rounds follow what is heard.* A peer is at most `overlap` rounds ahead of the peer that sends to
  it. It asks if it hears nothing, so lost messages delay it and no view has to be right: a peer
  waits only for one that is in an earlier round, so the peers of the earliest round wait for none.

With `overlap` above 0 (OSGP) a share travels behind the following steps.
"""

from collections.abc import Sequence
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
"""A peer that hears nothing asks after so long, and again."""

MOST_ROUNDS = 1 << 60

ROUND, ASKED = "round", "round?"
"""How far a peer is, and if a share of it is on its way to the one that asks; who asks says so."""


class Sgp(Algorithm):
    averages = "models"
    trainer_waits = True
    pushes_shares = True
    state_names = ("round",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """To whom a peer sends, and how far ahead it may be."""

        graph: Literal["exponential", "ring"] = "exponential"
        """``exponential``: to those 1, 2, 4, ... ranks further, in turn; an update reaches all in
        log2 P rounds. ``ring``: to the next one by name; each peer has one partner, and mixing
        takes O(P^2) rounds."""

        overlap: int = 0
        """So many rounds a peer goes on before a share of its own or of its sender must have
        arrived. 0: trainers stand still while shares travel; too large: shares are of old models.
        """

        def __post_init__(self) -> None:
            if self.overlap < 0:
                raise ConfigError(f"sgp overlap = {self.overlap} must be 0 or more")

    round = 0
    """How many rounds this peer has begun; a newcomer counts on from what it hears."""

    def __init__(self, config: "Sgp.Config | None" = None) -> None:
        super().__init__(config)
        self._heard: dict[PeerId, int] = {}  # rounds that have come, or that a peer says it is in
        self._pushing: dict[int, PeerId] = {}  # by round, to whom
        self._newest = 0  # round that any peer has spoken of

    @property
    def conserves_mean(self) -> bool:
        """The weighted mean, not the mean: a peer that heard nothing for long stands for less."""
        return False

    async def after_update(self, swarm: Swarm) -> None:
        peers = swarm.trainees()
        if self.round == 0 or self._newest > self.round + 2 * len(peers) + self.config.overlap:
            # We are new here, or were cut off. No member can say a round that leaves none to count.
            self.round = max(self.round, min(self._newest, MOST_ROUNDS // 2))
        self.round += 1
        if receiver := neighbour(self.config.graph, self.round, peers, swarm.me, 1):
            self._pushing[self.round] = receiver
            swarm.start(self._push(swarm, receiver, self.round))
        due = self.round - self.config.overlap
        asked_at = swarm.now
        while swarm.trains and self._is_behind(swarm, due):
            await swarm.wait_for_change(ASK_S)
            if swarm.now >= asked_at + ASK_S:
                asked_at = swarm.now
                if sender := neighbour(self.config.graph, due, swarm.trainees(), swarm.me, -1):
                    # Lost, or the answer: asked again.
                    swarm.tell(sender, AlgorithmMessage(ASKED, (self.round,)))

    async def _push(self, swarm: Swarm, receiver: PeerId, number: int) -> None:
        try:
            await swarm.push(receiver, 0.5, number)
        finally:
            del self._pushing[number]

    def _is_behind(self, swarm: Swarm, due: int) -> bool:
        """Whether our own share of the round `due` travels, or that of our sender has not come."""
        if any(number <= due for number in self._pushing):
            return True
        sender = neighbour(self.config.graph, due, swarm.trainees(), swarm.me, -1)
        return sender is not None and self._heard.get(sender, 0) < due

    def handle_push(self, swarm: Swarm, source: PeerId, clock: int) -> None:
        self._hear(source, clock)

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        match message:
            case AlgorithmMessage(kind="round?", numbers=(number,), peers=()):
                comes = [n for n, receiver in self._pushing.items() if receiver == source]
                # What travels is heard of when it has arrived. Lost: asked again.
                at = min(comes) - 1 if comes else self.round
                swarm.tell(source, AlgorithmMessage(ROUND, (at,)))
                self._note(source, number)  # its own share of that round may be on its way here
            case AlgorithmMessage(kind="round", numbers=(number,), peers=()):
                self._hear(source, number)
            case _:
                raise RemoteProtocolError(f"{source} says {message}, which is no round")

    def _hear(self, source: PeerId, number: int) -> None:
        self._note(source, number)
        self._heard[source] = max(self._heard.get(source, 0), number)

    def _note(self, source: PeerId, number: int) -> None:
        if number > MOST_ROUNDS:
            raise RemoteProtocolError(f"{source} speaks of round {number}")
        self._newest = max(self._newest, number)


def neighbour(
    graph: str, number: int, peers: Sequence[PeerId], me: PeerId, way: int
) -> PeerId | None:
    """To whom `me` sends in a round (`way` = 1), or who sends to it (-1); None: it is alone."""
    if len(peers) < 2 or number < 1:
        return None
    hops = (len(peers) - 1).bit_length() if graph == "exponential" else 1
    hop = 1 << number % hops
    return peers[(peers.index(me) + way * hop) % len(peers)]
