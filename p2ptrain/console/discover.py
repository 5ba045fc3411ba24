"""`p2ptrain peer --discover peer:4000`: peers that share one name find each other.

Where peers are started by number (``docker-compose up --scale peer=4``) nobody is the first, and
nobody knows an address. They share a name instead, behind which the name server keeps an address
for each of them. A peer asks all of these addresses, again and again, until one of two things is
true:

1. *somebody answers*: it joins there;
2. *nobody does, and for `SETTLE_S` the lowest address was its own*: it is the first.

**One swarm.** A peer listens only when this is over. So whoever answers is in a swarm, or is about
to join one that was there before it. Of all peers that look at the same time only one has the
lowest address, and the others wait for it. If it dies before it listens, the name server forgets
it, and the next one is the lowest. A peer that comes late, or starts again, finds somebody.

What this cannot exclude: a lower address that appears, or a swarm that becomes reachable again,
between the last look and the first to listen, some tenths of a second later.
"""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from p2ptrain.config import RunConfig
from p2ptrain.errors import CodecError, ConfigError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig

SETTLE_S: Seconds = 2.0
"""How long nobody answers before the lowest address begins; longer than a name server may take to
tell of a container that started before us."""

LOOK_EVERY_S: Seconds = 0.25
ASK_S: Seconds = 1.0
MOST_ADDRESSES = 4096
"""A name server that tells more than this is not ours."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where we are, and where to join; nowhere if we are the first."""

    ours: str
    hosts: tuple[Address, ...]


class Neighbourhood:
    """What is asked of the network, so that tests can answer.

    Args:
        network: how peers are talked to.
    """

    def __init__(self, network: GrpcConfig) -> None:
        self._network = network

    async def addresses(self, name: str) -> Sequence[str]:
        """The IP addresses behind a name, none if it has none (yet)."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(name, None, family=socket.AF_INET)
        except OSError:
            return ()
        return [str(where[0]) for *_, where in found[:MOST_ADDRESSES]]

    def is_ours(self, ip: str) -> bool:
        """True if this machine has the address."""
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
            return True
        return False

    async def answers(self, address: Address) -> bool:
        """True if a peer is there."""
        try:
            async with asking(address, self._network) as asker:
                await asker.identify(ASK_S)
        except (TransportError, CodecError):
            return False
        return True

    def name_of(self, ip: str) -> str:
        """What the network calls an address, without its domain; nothing if it does not say."""
        try:
            return socket.gethostbyaddr(ip)[0].partition(".")[0]
        except OSError:
            return ""


async def find_place(
    name: Address,
    timeout_s: Seconds,
    around: Neighbourhood,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]],
) -> Place:
    """Look behind `name` (``host:port``) until we know whom to join, or that we are the first.

    Raises:
        ConfigError: if no address behind the name is ours, or nobody has begun in `timeout_s`.
    """
    host, _, port = name.rpartition(":")
    deadline, lowest_since, ips = clock() + timeout_s, None, [""]
    while clock() < deadline:
        ips = sorted(set(await around.addresses(host)), key=_in_order)
        ours = next((ip for ip in ips if around.is_ours(ip)), None)
        if ours is not None:
            others = [Address(f"{ip}:{port}") for ip in ips if ip != ours]
            answers = await asyncio.gather(*(around.answers(other) for other in others))
            here = [other for other, yes in zip(others, answers, strict=True) if yes]
            if here:
                return Place(ours, tuple(here))
            lowest_since = (lowest_since or clock()) if ours == ips[0] else None
            if lowest_since is not None and clock() - lowest_since >= SETTLE_S:
                return Place(ours, ())
        await sleep(LOOK_EVERY_S)
    known = ", ".join(ips) or "nothing"
    raise ConfigError(
        f"discover = {name!r}: after {timeout_s:g} s it stands for {known}, where no peer answers "
        "and none is ours to begin; give a name that stands for all peers, this one among them"
    )


def settled(
    config: RunConfig,
    around: Neighbourhood,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]] = asyncio.sleep,
) -> RunConfig:
    """`config` with a place in its swarm, if it is to discover one, and by the numbers if so asked.

    The port of `discover` is that of all peers; `listen`, `advertise` and `name` follow from the
    place, unless they are given.

    Raises:
        ConfigError: as `find_place`, or if a name that is to be looked up is not known.
    """
    if config.advertise_ip:
        config = _by_number(config, around)
    if not config.discover:
        return config
    port = config.discover.rpartition(":")[2]
    finding = find_place(wire.address(config.discover), config.join_timeout_s, around, clock, sleep)
    place = asyncio.run(finding)
    return dataclasses.replace(
        config,
        discover="",
        join=place.hosts,
        listen=f"0.0.0.0:{port}",
        advertise=config.advertise or f"{place.ours}:{port}",
        name=config.name or around.name_of(place.ours),
    )


def _by_number(config: RunConfig, around: Neighbourhood) -> RunConfig:
    host, _, port = config.advertise.rpartition(":")
    ips = asyncio.run(around.addresses(host))
    if not ips:
        raise ConfigError(
            f"advertise = {config.advertise!r}: nothing is known under this name; give one that "
            "this machine can look up, or leave advertise_ip out"
        )
    return dataclasses.replace(config, advertise=f"{ips[0]}:{port}", advertise_ip=False)


def _in_order(ip: str) -> tuple[int, ...]:
    """Addresses as numbers: .9 comes before .10."""
    return tuple(int(part) for part in ip.split("."))
