"""Push-sum: the weight of this peer's model, and shares of it on their way to others.

A peer has a model z and a weight w, at first 1; the sum of w z over all peers is what averages
keep. (Papers keep x = w z and divide by w; the model that is trained is z in both.) To *push* a
share s of it:

    sender      w   <-  (1 - s) w                     its model stays as it is
    on the way  s w, with z as it was
    receiver    z   <-  z + w' / (w + w') (z' - z)    w' = s w and z' are what came
                w   <-  w + w'

So the sums of all w and of all w z, those on their way included, stay the same. z changes as a
delta: what a trainer adds meanwhile is kept, and weighs as much as its peer does.

A push that was certainly not taken in (`runtime/pushes.py`) comes back, as if this peer had pushed
to itself. One that may have been goes with its receiver, which is dead or gone, as that one's own
weight does. Weights are never made twice: the sum of all is at most the number of peers. A peer
that starts begins with weight 1; every model is a model whatever its weight.

With a lossy codec Q the sender keeps what rounding takes: z <- z + w' / w (z' - Q(z')).

Legend of shapes: ``M`` numbers of a model.
"""

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.averaging.base import GroupResult
from p2ptrain.compute.codec import load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import RefusedError, StateError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.pushes import Answer, Delivery, Push
from p2ptrain.runtime.robust import exact_squares

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

SHARE = "share"
"""As an opening names it."""

LEAST_WEIGHT = 2.0**-20
"""A peer with less of it has pushed more often than it was pushed to; it waits until it is."""


LEAST_COUNTED = 1 / 16
"""No estimate of progress grows by more than sixteen times a peer's share of it. Larger: the swarm
goes on beyond its samples, since near the end those that still train push half of their weight in
each round, and get none from those that are done. Smaller: one that is cut off ends too soon."""


class Shares:
    """One peer's weight; a `Taker`."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._changing = asyncio.Lock()  # model and weight change together
        self.weight = 1.0
        self.on_the_way: dict[Ticket, float] = {}
        """Weights that have left, and are not known to have arrived; those that never will, too."""

    @property
    def counted_weight(self) -> float:
        """What samples are divided by in an estimate of progress, whose weighted mean is kept.

        1 where no shares are pushed.
        """
        return max(self.weight, LEAST_COUNTED)

    async def push(self, to: PeerId, share: float, clock: int) -> GroupResult:
        """Push this share of the model to `to`.

        `DONE`: it was taken in. `LOST`: it came back, or has gone with its receiver.
        """
        host, pushes = self._host, self._host.pushes
        members = (min(host.name, to), max(host.name, to))
        async with pushes.one_at_a_time(to):
            if self.weight * share < LEAST_WEIGHT:
                return GroupResult(Outcome.BUSY, f"{host.name} has given all its weight", members)
            model_M = host.averages.buffers.take(host.replica.model_size)
            ticket = host.machine.groups.lock.next_ticket()
            async with self._changing:
                await host.averages.executor(lambda: host.replica.snapshot(model_M))
                if not np.isfinite(model_M).all():
                    host.averages.buffers.give(model_M)
                    host.fail(StateError(f"the model of {host.name} is not finite any more"))
                    return GroupResult(Outcome.BROKEN, "our own model is not finite", members)
                sent = self.weight * share
                self.weight -= sent
                self.on_the_way[ticket] = sent
            delivery = await self._deliver(to, sent, clock, model_M, ticket)
            if delivery.is_taken:
                del self.on_the_way[ticket]
            elif delivery.is_back:
                async with self._changing:
                    await host.averages.executor(lambda: self._merge(model_M, sent))
                    self.weight += self.on_the_way.pop(ticket)
            host.averages.buffers.give(model_M)
        outcome = Outcome.DONE if delivery.is_taken else Outcome.LOST
        return GroupResult(outcome, delivery.why, members)

    async def _deliver(
        self, to: PeerId, sent: float, clock: int, model_M: Vector, ticket: Ticket
    ) -> Delivery:
        host, codec = self._host, load_codec(self._host.averages.config.codec)
        before_M = None if codec.is_exact else model_M.copy()
        head = host.pushes.push(to, weight=sent, clock=clock)
        delivery = await host.pushes.deliver(SHARE, to, head, model_M, codec, ticket=ticket)
        if before_M is not None:
            async with self._changing:
                np.subtract(before_M, model_M, out=before_M)
                np.multiply(before_M, np.float32(sent / self.weight), out=before_M)
                await host.averages.executor(lambda: host.replica.add_delta(before_M))
        return delivery

    # --- the receiver's side ----------------------------------------------------------------------

    def check(self, source: PeerId, push: Push, size: int) -> None:
        """Raise RefusedError for what is no model of ours."""
        host = self._host
        if not host.algorithm.pushes_shares:
            raise RefusedError(f"the algorithm of {host.name} pushes no shares")
        if size != host.replica.model_size or push.parts != 1:
            raise RefusedError(f"{source} pushes {size} numbers to {host.name}")
        most = 1 + len(host.machine.membership.others)  # what all weights are together
        if push.weight > most:
            raise RefusedError(f"{source} pushes a weight of {push.weight:g}, and all have {most}")

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """Take a share in, unless it comes again. Raises RefusedError if it is not finite."""
        host = self._host
        if again:
            return Answer()
        if not np.isfinite(vector_S).all():
            raise RefusedError(f"{source} pushed numbers that are not finite")
        async with self._changing:
            began, updates = host.now, host.replica.updates
            attempt.consensus_distance_l2 = await host.averages.executor(
                lambda: self._merge(vector_S, push.weight)
            )
            taken = push.weight / (self.weight + push.weight)
            self.weight += push.weight
            host.agreed.progress += round(taken * (push.progress - host.agreed.progress))
            attempt.apply_s = host.now - began
            attempt.staleness_steps = host.replica.updates - updates
        host.tell_of_push(source, push.clock)
        return Answer()

    def _merge(self, theirs_M: Vector, weight: float) -> float:
        """Move the model towards another one; returns how far, as a norm."""
        replica = self._host.replica
        delta_M = np.empty(replica.model_size, np.float32)
        replica.snapshot(delta_M)
        np.subtract(theirs_M, delta_M, out=delta_M)
        np.multiply(delta_M, np.float32(weight / (self.weight + weight)), out=delta_M)
        distance = float(np.sqrt(exact_squares(delta_M)))
        replica.add_delta(delta_M)
        return distance
