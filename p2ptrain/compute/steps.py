"""The loop of one peer: compute, last as long as the pace says, then the boundary.

There is one loop body. It is a coroutine, and what it waits for comes in as arguments: for real
nothing of it ever waits for an event loop (`compute/training.py` runs it on the caller's thread,
where `sleep` blocks); in a simulated world the waits are on virtual time (`sim/peer.py`).

A step is cut short only while it sleeps: once the peer should stop, a straggler leaves within a
slice of its sleep, and what it was computing is dropped, for it would have come too late.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.dealt import DealsData
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.ids import Seconds

SLICE_S: Seconds = 0.05
"""How long a real peer sleeps at a time."""

FORWARD = 1 / 3
"""Of a step that is made to last, the share of the forward pass; a backward pass takes twice as
long, as it computes gradients of inputs and of parameters."""


class Work(Protocol):
    """What a peer computes in a step."""

    @property
    def batch_size(self) -> int:
        """Samples of a step, if all peers were as fast."""
        ...

    @property
    def by_speed(self) -> bool:
        """Whether the peer says how many of them it is."""
        ...

    def compute(self, step: int, samples: int) -> tuple[int, float | None]:
        """Make gradients of the next batch; return its samples, and the loss if there is one."""
        ...

    def draw_from(self, peer: DealsData) -> None:
        """Draw samples from the data that `peer` deals, where data are dealt; before it joins."""
        ...

    def prepare(self, progress: int) -> None:
        """An update comes next, after so many samples of the swarm."""
        ...


class TrainingPeer(Protocol):
    """What a loop reads of a peer, whether its steps are awaited or block."""

    @property
    def should_stop(self) -> bool:
        """True once the run has reached its end."""
        ...

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far."""
        ...

    @property
    def buckets(self) -> Buckets | None:
        """What the backward pass fills, if anything travels meanwhile."""
        ...

    def batch_size(self, usual: int) -> int:
        """Samples of the next step, where batches are divided by speed; see `Peer.batch_size`."""
        ...


class Stepping(TrainingPeer, Protocol):
    """What this loop needs of a peer."""

    def before_forward(self, bucket: int) -> Awaitable[None]:
        """The forward pass is about to use the parameters of this bucket."""
        ...

    def step(self, samples: int, loss: float | None) -> Awaitable[None]:
        """The boundary: average, update, count. Gradients are ready."""
        ...


async def take_steps(
    work: Work,
    peer: Stepping,
    pace: StepTiming,
    *,
    rank: int,
    peers: int,
    seed: int,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]],
    slice_s: Seconds = SLICE_S,
) -> None:
    """Train until the peer should stop.

    Args:
        work: what is computed, and on what.
        peer: asked to step once for each batch.
        pace: how long each step is made to last, beside what computing takes on `clock`.
        rank: this peer's place in the pace, 0 to ``peers - 1``.
        peers: how many there are by the run's plan.
        seed: the run's, shared by all peers.
        clock: any monotonic clock.
        sleep: waits so many of its seconds.
        slice_s: a sleeping step asks this often whether it should stop.

    Raises:
        ConfigError: if `rank`, `peers` or the stragglers do not fit together.
    """
    pace.check(peers)
    step = 0
    while not peer.should_stop:
        buckets = peer.buckets  # others, once the swarm has another algorithm
        if buckets and pace.takes_time:
            buckets.is_held = True
        started = clock()
        samples = peer.batch_size(work.batch_size) if work.by_speed else work.batch_size
        share = samples / work.batch_size
        if buckets and buckets.is_held:
            forward_s = FORWARD * pace.step_s(0.0, rank, step, peers, seed, share)
            for bucket, part in buckets.in_forward_order:
                if not await _slept_until(started + forward_s * part, peer, clock, sleep, slice_s):
                    return
                before = clock()
                await peer.before_forward(bucket)
                started += clock() - before
        began = clock()  # what was slept of the forward pass is stretched already
        samples, loss = work.compute(step, samples)
        duration_s = pace.step_s(clock() - began, rank, step, peers, seed, share)
        if buckets and buckets.is_held:
            for part in buckets.shares:
                at = started + duration_s * (FORWARD + (1 - FORWARD) * part)
                if not await _slept_until(at, peer, clock, sleep, slice_s):
                    return
                buckets.reach(part)
        if not await _slept_until(started + duration_s, peer, clock, sleep, slice_s):
            return
        work.prepare(peer.progress)
        await peer.step(samples, loss)
        step += 1


async def serve_others(work: Work, peer: Stepping) -> None:
    """The loop of a peer that only serves: steps without samples, as long as others make theirs.

    Where peers are not in step there is none: one that has left its loop serves the others.
    """
    while not peer.should_stop:
        work.prepare(peer.progress)
        await peer.step(0, None)


async def _slept_until(
    end: Seconds,
    peer: Stepping,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]],
    slice_s: Seconds,
) -> bool:
    """Sleep in slices; False if the peer should stop before `end`."""
    while (left_s := end - clock()) > 0:
        if peer.should_stop:
            return False
        await sleep(min(left_s, slice_s))
    return True
