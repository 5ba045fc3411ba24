"""Plan the faults of a world: what fails, when, and for how long.

A fault begins at `at_s` of the world's clock, or as soon as a peer has made `at_step` steps over
all its restarts: the peer that the fault affects, or the one that `of` names. It ends `for_s`
later; without `for_s`, never. ::

    plan = [
        Crash(peer="p3", at_step=50, for_s=2.0),              # kill -9; back two seconds later
        Pause(peer="p1", at_s=10.0, for_s=3.0),               # SIGSTOP, SIGCONT
        SlowDown(peer="p2", at_s=0.0, factor=4.0),            # until the end
        Drift(peer="p4", at_s=0.0, rate=1.001),               # 1 ms a second fast
        Partition(parts=(("p0", "p1"),), at_s=20.0, for_s=5.0),   # these two, and all others
        Hold(source="p0", target="p1", at_s=30.0, for_s=0.5),
        Throttle(peer="p5", bytes_s=1e6, at_s=0.0, for_s=60.0),
    ]
    carrying_out = asyncio.create_task(world.carry_out(plan))

The beginning and the end of each are lines of the trace. Faults may overlap, also those of one kind
(`ActiveFaults` counts them). A fault on a dead peer has no effect, and the trace says so.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol, TypeVar

from p2ptrain.errors import ConfigError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.runtime.scope import Scope
from p2ptrain.sim.link import check_bandwidth
from p2ptrain.sim.loop import VirtualLoop, virtual_loop
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.process import Process
from p2ptrain.sim.trace import Trace

TRY_AGAIN_S: Seconds = 1.0
"""A restarting peer that is not admitted (because it is cut off, say) retries after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """When a fault begins, and for how long it lasts."""

    at_s: Seconds | None = None
    at_step: int | None = None
    of: str = ""
    for_s: Seconds | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if (self.at_s is None) == (self.at_step is None):
            raise ConfigError(
                f"{kind}: at_s = {self.at_s}, at_step = {self.at_step}; give exactly one of them"
            )
        for name in ("at_s", "at_step", "for_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{kind}: {name} = {value} must be 0 or more")
        if self.at_step is not None and not self.counts_steps_of:
            raise ConfigError(f"{kind}: at_step = {self.at_step} of which peer? Name it in `of`")

    @property
    def about(self) -> tuple[str, ...]:
        """The peers that it names."""
        return ()

    @property
    def counts_steps_of(self) -> str:
        """The peer whose steps `at_step` counts."""
        return self.of or (self.about[0] if len(self.about) == 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfPeer(_Timed):
    """A fault of one peer."""

    peer: str
    ends: ClassVar[str]
    """What the peer does at its end."""

    @property
    def about(self) -> tuple[str, ...]:
        return (self.peer,)

    @property
    def end(self) -> str:
        """The trace's words for its end."""
        return f"{self.peer} {self.ends}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(_OfPeer):
    """It dies, as by kill -9; at the end it restarts under a new incarnation."""

    keeps_model: bool = False
    """Restart with its own last model, not with another peer's."""
    ends = "is back"

    def __str__(self) -> str:
        return f"{self.peer} crashes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(_OfPeer):
    """It is stopped; messages to it wait."""

    ends = "goes on"

    def __str__(self) -> str:
        return f"{self.peer} is paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDown(_OfPeer):
    """Computing takes it `factor` times as long."""

    factor: float
    ends = "is as fast as before"

    def __post_init__(self) -> None:
        _Timed.__post_init__(self)
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"SlowDown: factor = {self.factor} must be above 0")

    def __str__(self) -> str:
        return f"{self.peer} computes {self.factor:g} times as long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(_OfPeer):
    """Its clock advances by `rate` seconds per second."""

    rate: float
    ends = "has a clock that runs like others"

    def __post_init__(self) -> None:
        _Timed.__post_init__(self)
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"Drift: rate = {self.rate} must be above 0; 1.001 is 1 ms a second")

    def __str__(self) -> str:
        return f"{self.peer} has a clock at rate {self.rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle(_OfPeer):
    """Its uplink carries no more than `bytes_s`."""

    bytes_s: float
    ends = "sends as fast as before"

    def __post_init__(self) -> None:
        _Timed.__post_init__(self)
        check_bandwidth("Throttle: bytes_s", self.bytes_s)

    def __str__(self) -> str:
        return f"{self.peer} sends {self.bytes_s:g} bytes a second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(_Timed):
    """Nothing passes between parts; peers in none of them form one more part."""

    parts: tuple[tuple[str, ...], ...]
    end: ClassVar[str] = "the partition is healed"

    @property
    def about(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part)

    def __str__(self) -> str:
        return f"nothing passes between {' | '.join(map(','.join, self.parts))} | all others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(_Timed):
    """Traffic from `source` to `target` stops in flight, and goes on at the end."""

    source: str
    target: str

    @property
    def about(self) -> tuple[str, ...]:
        return (self.source, self.target)

    def __str__(self) -> str:
        return f"{self.source} to {self.target} is held"

    @property
    def end(self) -> str:
        """The trace's words for its end."""
        return f"{self.source} to {self.target} is released"


PeerFault = Crash | Pause | SlowDown | Drift | Throttle
LastingFault = Pause | SlowDown | Drift | Throttle | Partition | Hold
Fault = Crash | LastingFault
F = TypeVar("F", Pause, SlowDown, Drift, Throttle)


class Place(Protocol):
    """Where faults last: peers and the network between them."""

    network: SimNetwork

    def address_of(self, name: PeerId) -> Address:
        """A peer's address, also after a crash. Raises ConfigError for an unknown peer."""
        ...

    def process_of(self, name: PeerId) -> Process | None:
        """None for a peer that has crashed."""
        ...


class Afflicted(Place, Protocol):
    """The target of a plan: a world."""

    trace: Trace

    def crash(self, name: str) -> None: ...

    async def restart(self, name: str, *, keeps_model: bool = False) -> object:
        """Raises RefusedError, TransportError."""
        ...


async def carry_out(plan: Sequence[Fault], world: Afflicted) -> None:
    """Carry out `plan`; returns when its last fault has ended.

    Raises:
        ConfigError: if it names a peer that is not of this world; no fault has begun then.
    """
    for fault in plan:
        for name in (*fault.about, *([fault.of] if fault.of else [])):
            world.address_of(PeerId(name))
    active = ActiveFaults(world)
    async with Scope() as scope:
        for fault in plan:
            scope.start(_happen(fault, world, active))


class ActiveFaults:
    """The faults that a world has now, except for crashes; several of one kind count together.

    A peer stands still while any pause of it lasts; of slow-downs and throttles of one peer the
    severest counts, of drifts the latest; nothing passes between two peers that any partition
    divides, and nothing is released that another fault holds.
    """

    def __init__(self, world: Place) -> None:
        self._world = world
        self._active: list[LastingFault] = []

    def apply(self, fault: LastingFault) -> None:
        """Let a fault begin."""
        self._active.append(fault)
        self._enforce(fault)

    def revert(self, fault: LastingFault) -> None:
        """End a fault that was applied; the others go on."""
        self._active.remove(fault)
        self._enforce(fault)

    def end_pauses(self) -> None:
        """Let all peers go on: a paused one can neither leave nor clean up."""
        for fault in [one for one in self._active if isinstance(one, Pause)]:
            self.revert(fault)

    def renew(self, peer: PeerId) -> None:
        """`peer` has a new process: its machine is as slow as before, and its clock as wrong."""
        for fault in self._active:
            if isinstance(fault, SlowDown | Drift) and fault.peer == peer:
                self._enforce(fault)

    def _enforce(self, fault: LastingFault) -> None:
        """Let the world be as all active faults of this kind and place together want it."""
        loop, network = virtual_loop(), self._world.network
        match fault:
            case Partition():
                network.partition(*self._parts())
            case Hold(source=source, target=target):
                way = _at(source, self._world), _at(target, self._world)
                held = (one for one in self._active if isinstance(one, Hold))
                is_held = any((one.source, one.target) == (source, target) for one in held)
                change = network.hold if is_held else network.release
                change(*way)
            case Throttle(peer=peer):
                rates = [one.bytes_s for one in _of(peer, Throttle, self._active)]
                network.throttle(_at(peer, self._world), min(rates, default=None))
            case Pause() | SlowDown() | Drift():
                if process := self._world.process_of(PeerId(fault.peer)):
                    _enforce_on(process, fault, self._active, loop)

    def _parts(self) -> Iterator[Sequence[Address]]:
        """The parts of all partitions at a time: whom any of them divides is divided."""
        where: dict[str, list[int]] = {}
        partitions = [fault for fault in self._active if isinstance(fault, Partition)]
        for index, partition in enumerate(partitions):
            for number, part in enumerate(partition.parts, start=1):
                for name in part:
                    where.setdefault(name, [0] * len(partitions))[index] = number
        for place in sorted({tuple(numbers) for numbers in where.values()}):
            yield [_at(name, self._world) for name in where if tuple(where[name]) == place]


def _enforce_on(
    process: Process,
    fault: Pause | SlowDown | Drift,
    active: Sequence[LastingFault],
    loop: VirtualLoop,
) -> None:
    match fault:
        case Pause():
            change = loop.pause if _of(fault.peer, Pause, active) else loop.resume
            change(process)
        case SlowDown():
            slow_downs = _of(fault.peer, SlowDown, active)
            process.slowness = max((one.factor for one in slow_downs), default=1.0)
        case Drift():
            drifts = _of(fault.peer, Drift, active)
            loop.set_rate(process, drifts[-1].rate if drifts else 1.0)


def _of(peer: str, kind: type[F], active: Sequence[LastingFault]) -> list[F]:
    return [one for one in active if isinstance(one, kind) and one.peer == peer]


async def _happen(fault: Fault, world: Afflicted, active: ActiveFaults) -> None:
    loop = virtual_loop()
    if fault.at_s is not None:
        await loop.wait(max(0.0, fault.at_s - loop.now))
    else:
        assert fault.at_step is not None
        await world.trace.wait_for_step(PeerId(fault.counts_steps_of), fault.at_step)
    lasts = "" if fault.for_s is None else f" for {fault.for_s:g} s"
    if isinstance(fault, PeerFault) and world.process_of(PeerId(fault.peer)) is None:
        world.trace.note(loop.now, f"! {fault}{lasts}: no, it is dead")
        return
    world.trace.note(loop.now, f"! {fault}{lasts}")
    if isinstance(fault, Crash):
        world.crash(fault.peer)
    else:
        active.apply(fault)
    if fault.for_s is None:
        return
    await loop.wait(fault.for_s)
    if isinstance(fault, Crash):
        await _come_back(fault.peer, fault.keeps_model, world)
        active.renew(PeerId(fault.peer))
    else:
        active.revert(fault)
    world.trace.note(loop.now, f"! {fault.end}")


async def _come_back(peer: str, keeps_model: bool, world: Afflicted) -> None:
    loop = virtual_loop()
    while True:  # until the world ends, like a process supervisor
        try:
            await world.restart(peer, keeps_model=keeps_model)
            return
        except (RefusedError, TransportError) as error:
            world.trace.note(loop.now, f"! {peer} cannot come back: {error}")
            await loop.wait(TRY_AGAIN_S)


def _at(name: str, world: Place) -> Address:
    return world.address_of(PeerId(name))


# --- chance ---------------------------------------------------------------------------------------

MAX_DRIFT = 0.02
MEAN_GAP_S: Seconds = 2.0


def random_plan(seed: int, peers: Sequence[str], until_s: Seconds) -> tuple[Fault, ...]:
    """Random faults of all kinds, all over at `until_s`, so progress can be demanded then.

    A peer has one fault at a time, one partition is in force at a time, and fewer than half of the
    peers are dead at any moment.
    """
    chance = Random(f"{seed}/faults")
    return tuple(_faults(chance, list(peers), until_s))


def _faults(chance: Random, peers: list[str], until_s: Seconds) -> Iterator[Fault]:
    free_at = dict.fromkeys([*peers, "network"], 0.0)
    back_at: list[Seconds] = []
    now = chance.expovariate(1 / MEAN_GAP_S)
    while now < until_s:
        for_s = min(until_s - now, chance.uniform(0.1, 5.0))
        spared = [name for name in peers if free_at[name] <= now]
        dead = sum(at > now for at in back_at)
        kinds = ["pause", "slow", "drift", "throttle", "hold"] if len(spared) > 1 else []
        kinds += ["partition"] if free_at["network"] <= now and len(peers) > 1 else []
        kinds += ["crash"] if spared and 2 * (dead + 1) < len(peers) else []
        kind = chance.choice(kinds) if kinds else ""
        if kind == "partition":
            free_at["network"] = now + for_s
            part = chance.sample(peers, chance.randrange(1, len(peers)))
            yield Partition(parts=(tuple(sorted(part)),), at_s=now, for_s=for_s)
        elif kind:
            victim = chance.choice(spared)
            free_at[victim] = now + for_s
            if kind == "crash":
                back_at.append(now + for_s)
            yield _fault(kind, victim, peers, now, for_s, chance)
        now += chance.expovariate(1 / MEAN_GAP_S)


def _fault(
    kind: str, peer: str, peers: list[str], at_s: Seconds, for_s: Seconds, chance: Random
) -> Fault:
    match kind:
        case "crash":
            keeps_model = chance.random() < 0.5
            return Crash(peer=peer, at_s=at_s, for_s=for_s, keeps_model=keeps_model)
        case "pause":
            return Pause(peer=peer, at_s=at_s, for_s=for_s)
        case "slow":
            return SlowDown(peer=peer, at_s=at_s, for_s=for_s, factor=chance.uniform(2, 8))
        case "drift":
            rate = 1 + chance.uniform(-MAX_DRIFT, MAX_DRIFT)
            return Drift(peer=peer, at_s=at_s, for_s=for_s, rate=rate)
        case "throttle":
            return Throttle(peer=peer, at_s=at_s, for_s=for_s, bytes_s=10 ** chance.uniform(3, 6))
        case _:
            target = chance.choice([name for name in peers if name != peer])
            return Hold(source=peer, target=target, at_s=at_s, for_s=for_s)
