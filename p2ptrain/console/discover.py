"""Let peers that share one name find each other: `p2ptrain peer --discover peer:4000`.

Where peers are started by number (``docker-compose up --scale peer=4``) no peer is the first, and
none has another's address. They share a name instead, which the name server resolves to one address
per peer. A peer queries all of these addresses repeatedly until one of two conditions holds:

1. *a peer answers*: join it;
2. *none answers, and for `SETTLE_S` the lowest address was its own*: be the first.

**One swarm.** A peer listens only after this. So a peer that answers is in a swarm, or is about to
join an older one. Of all peers that query at the same time only one has the lowest address, and the
others wait for it. If it dies before it listens, the name server removes it, and the next one is
the lowest. A peer that starts late, or restarts, gets an answer.

Not excluded: a lower address that appears, or a swarm that becomes reachable again, between the
last query and the moment the first peer listens, some tenths of a second later.

Where no name stands for all, as on the hosts of a list, the names of all are given instead:
``--discover a:4000,b:4000,b:4001``. The rule is the same. But such a name stays when its peer is
dead: if that of the lowest address never answers, no peer is the first, and all end with an error.
"""

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from p2ptrain.config import RunConfig
from p2ptrain.errors import CodecError, ConfigError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig

SETTLE_S: Seconds = 2.0
"""How long no peer answers before the lowest address starts a swarm; longer than a name server may
take to publish a container that started earlier."""

LOOK_EVERY_S: Seconds = 0.25
ASK_S: Seconds = 1.0
MOST_ADDRESSES = 4096
"""More addresses than this are not those of a swarm; the rest are ignored."""

MOST_SHOWN = 8
"""How many addresses an error names."""

ADDRESS_EVERY_S: Seconds = 30.0
"""Between two looks at what the own name stands for."""

LOOK_ENDS_S: Seconds = 1.0
"""How long a peer that ends waits for a look-up of its name; DNS may take longer."""

_NOT_GIVEN = RunConfig().listen


@dataclass(frozen=True, slots=True)
class Place:
    """This peer's address, by number, and the peers to join; none if it is the first."""

    ours: Address
    hosts: tuple[Address, ...]


class Neighbourhood:
    """The queries to the network, which tests replace.

    Args:
        network: the connections to peers.
    """

    def __init__(self, network: GrpcConfig) -> None:
        self._network = network

    async def addresses(self, name: str) -> Sequence[str]:
        """The IP addresses of a name; empty if it has none (yet)."""
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
        """True if a peer answers at `address`."""
        try:
            async with asking(address, self._network) as asker:
                await asker.identify(ASK_S)
        except (TransportError, CodecError):
            return False
        return True

    def name_of(self, ip: str) -> str:
        """The host name of an address, without its domain; empty if there is none."""
        try:
            return socket.gethostbyaddr(ip)[0].partition(".")[0]
        except OSError:
            return ""


async def find_place(
    names: Sequence[Address],
    timeout_s: Seconds,
    around: Neighbourhood,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]],
    listen: str = "",
) -> Place:
    """Resolve `names` (``host:port``) until there are peers to join, or this peer is the first.

    Args:
        names: at least one; together they stand for all peers.
        timeout_s: how long to look.
        around: the network.
        clock: in seconds.
        sleep: waits for so many seconds.
        listen: where this peer listens, if that says which of several addresses is its own.

    Raises:
        ConfigError: if no address of the names is ours, or no swarm started in `timeout_s`.
    """
    deadline, lowest_since, known = clock() + timeout_s, None, list[Address]()
    while clock() < deadline:
        known = await _addresses(names, around)
        ours = await _ours_of(known, listen, around)
        if ours is not None:
            others = [one for one in known if one != ours]
            answers = await asyncio.gather(*(around.answers(other) for other in others))
            here = [other for other, yes in zip(others, answers, strict=True) if yes]
            if here:
                return Place(ours, tuple(here))
            lowest_since = (lowest_since or clock()) if ours == known[0] else None
            if lowest_since is not None and clock() - lowest_since >= SETTLE_S:
                return Place(ours, ())
        await sleep(LOOK_EVERY_S)
    shown = ", ".join(known[:MOST_SHOWN]) or "nothing"
    more = f" and {len(known) - MOST_SHOWN} more" if len(known) > MOST_SHOWN else ""
    raise ConfigError(
        f"discover = {','.join(names)!r}: after {timeout_s:g} s it stands for {shown}{more}, where "
        "no peer answers and none is ours to begin; give a name that stands for all peers, or all "
        "their names, this one among them"
    )


async def _addresses(names: Sequence[Address], around: Neighbourhood) -> list[Address]:
    """The addresses that the names stand for now, by number, in their order."""
    hosts = dict.fromkeys(name.rpartition(":")[0] for name in names)
    found = await asyncio.gather(*(around.addresses(host) for host in hosts))
    ips = dict(zip(hosts, found, strict=True))
    pairs = (name.rpartition(":") for name in names)
    known = {Address(f"{ip}:{port}") for host, _, port in pairs for ip in ips[host]}
    return sorted(known, key=_in_order)[:MOST_ADDRESSES]


async def _ours_of(known: Sequence[Address], listen: str, around: Neighbourhood) -> Address | None:
    """The first of the addresses that is this machine's, or the one where this peer listens."""
    host, _, port = listen.rpartition(":")
    if listen:
        known = [one for one in known if one.rpartition(":")[2] == port]
    if host not in ("", "0.0.0.0"):
        here = await around.addresses(host)
        known = [one for one in known if one.rpartition(":")[0] in here]
    return next((one for one in known if around.is_ours(one.rpartition(":")[0])), None)


def settled(
    config: RunConfig,
    around: Neighbourhood,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], Awaitable[None]] = asyncio.sleep,
) -> RunConfig:
    """`config` with the discovered place in its swarm, and an IP address if so configured.

    `listen`, `advertise` and `name` follow from the place, unless they are given.

    Raises:
        ConfigError: as `find_place`, or if a name does not resolve.
    """
    if config.advertise_ip:
        config = _by_number(config, around)
    if not config.discover:
        return config
    names = tuple(wire.address(name) for name in config.discovered_names)
    listen = "" if config.listen == _NOT_GIVEN else config.listen
    finding = find_place(names, config.join_timeout_s, around, clock, sleep, listen)
    place = asyncio.run(finding)
    ip, _, port = place.ours.rpartition(":")
    return dataclasses.replace(
        config,
        discover="",
        join=place.hosts,
        listen=listen or f"0.0.0.0:{port}",
        advertise=config.advertise or place.ours,
        name=config.name or around.name_of(ip),
    )


class AddressFollower:
    """While inside: looks the advertised name up again and again, and advertises what it finds.

    Args:
        name: ``host:port`` as configured, with `advertise_ip`; empty: there is nothing to follow.
        at: the address that is advertised already.
        around: looks names up.
        advertise: called with each new address, in a thread of its own.
        every_s: between two looks.
    """

    def __init__(
        self,
        name: str,
        at: str,
        around: Neighbourhood,
        advertise: Callable[[str], None],
        every_s: Seconds = ADDRESS_EVERY_S,
    ) -> None:
        self._name, self._at, self._around = name, at, around
        self._advertise, self._every_s = advertise, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2ptrain-address", daemon=True)

    def __enter__(self) -> Self:
        if self._name:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._name:
            self._thread.join(LOOK_ENDS_S)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Once. A name that stands for nothing at the moment, or still for the same, is left."""
        host, _, port = self._name.rpartition(":")
        ips = asyncio.run(self._around.addresses(host))
        found = [f"{ip}:{port}" for ip in ips]
        if found and self._at not in found and not self._over.is_set():
            self._at = found[0]
            self._advertise(self._at)


def _by_number(config: RunConfig, around: Neighbourhood) -> RunConfig:
    host, _, port = config.advertise.rpartition(":")
    ips = asyncio.run(around.addresses(host))
    if not ips:
        raise ConfigError(
            f"advertise = {config.advertise!r}: nothing is known under this name; give one that "
            "this machine can look up, or leave advertise_ip out"
        )
    return dataclasses.replace(config, advertise=f"{ips[0]}:{port}", advertise_ip=False)


def _in_order(address: Address) -> tuple[int, ...]:
    """Sort addresses as numbers: .9 comes before .10, and port 80 before 4000."""
    return tuple(int(part) for part in address.replace(":", ".").split("."))
