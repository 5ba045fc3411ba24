"""A swarm that is made up: reports of any number of peers over made-up time, the same every time.

By hand, for a look at the page (`--serve` answers over gRPC, to measure what asking costs)::

    python -m tests.ui.feed --peers 64
    python -m tests.ui.feed --peers 64 --serve
"""

import argparse
import asyncio
import math
import time
from dataclasses import dataclass, field, replace
from random import Random

from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.wire import Hello, Report
from p2ptrain.ui.server import LivePage, PageConfig
from p2ptrain.ui.swarm import SwarmView

STEP_S: Seconds = 0.25
BATCH = 32


def member(name: str, **changes: object) -> Member:
    fields = {"peer": name, "address": f"{name}:4000", "incarnation": 1, "phase": Phase.TRAINING}
    return Member(**{**fields, **changes})


def report(name: str, *others: Member, me: dict[str, object] | None = None, **changes: object):
    hello = Hello((1, 0), "ad_psgd", "digest", 17_226, member(name, **(me or {})))
    fields = {
        "hello": replace(hello, algorithm=changes.pop("algorithm", "ad_psgd")),
        "members": others,
        "unix_s": 0.0,
        "running_s": 60.0,
        "samples_per_s": 1000.0,
        "wait_share": 0.0,
        "progress": 123_456,
        "doing": "trains",
        "loss": 0.5,
        "partners": (),
        "consensus_distance_l2": 0.125,
        "groups_done": 0,
        "groups_failed": 0,
        "warning": "",
    }
    return Report(**{**fields, **changes})


@dataclass
class Made:
    """One made-up peer."""

    name: str
    speed: float = 1.0
    link_mbit: int = 940
    state: MemberState = MemberState.ALIVE
    answers: bool = True
    silence: str = ""
    phase: Phase = Phase.TRAINING
    waits: float = 0.04
    steps: float = 0.0
    groups: int = 0
    partners: tuple[str, ...] = ()
    incarnation: int = 1


@dataclass
class MadeUpSwarm:
    """Peers that train and average in pairs, some of them slow, and some of which fail.

    With `by_itself`, things happen to them; else only what a test says.
    """

    count: int
    by_itself: bool = False
    rng: Random = field(default_factory=lambda: Random(7))
    now: Seconds = 0.0

    def __post_init__(self) -> None:
        digits = max(2, len(str(self.count - 1)))
        self.peers = [Made(f"p{rank:0{digits}}") for rank in range(self.count)]
        for peer in self.peers:
            peer.speed *= self.rng.uniform(0.93, 1.07)
            peer.waits = self.rng.uniform(0.01, 0.08)
        if self.by_itself:
            self._spoil()

    def _spoil(self) -> None:
        self.peers[self.count // 3].speed = 0.27
        if self.count >= 8:
            self.peers[self.count // 2].link_mbit = 20
            self.peers[self.count // 2].waits = 0.35
            for peer in self.rng.sample(self.peers, self.count // 16):
                peer.speed *= 0.6

    def pass_time(self, seconds: Seconds) -> None:
        """Let them train and average, and things happen."""
        self.now += seconds
        here = [p for p in self.peers if p.answers and p.state is MemberState.ALIVE]
        for peer in here:
            peer.steps += seconds * peer.speed * (1 - peer.waits) / STEP_S
        for peer in self.rng.sample(here, math.ceil(len(here) * seconds * 0.4)):
            other = self.rng.choice(here)
            if other is not peer:
                peer.partners, other.partners = (other.name,), (peer.name,)
                peer.groups, other.groups = peer.groups + 1, other.groups + 1
        if self.by_itself and self.count >= 8:
            self._things_happen()

    def _things_happen(self) -> None:
        self._at(20, lambda: self._suspect(5))
        self._at(26, lambda: self._kill(5))
        self._at(31, lambda: self._silence(2))
        self._at(40, lambda: self._kill(6))
        self._at(48, lambda: self._revive(6))

    def _at(self, moment: Seconds, happens) -> None:
        if moment <= self.now < moment + 0.5 and not getattr(self, f"_{moment}", False):
            setattr(self, f"_{moment}", True)
            happens()

    def _suspect(self, rank: int) -> None:
        self.peers[rank].state = MemberState.SUSPECT

    def _kill(self, rank: int) -> None:
        self.peers[rank].state, self.peers[rank].answers = MemberState.DEAD, False

    def _revive(self, rank: int) -> None:
        peer = self.peers[rank]
        peer.state, peer.answers, peer.incarnation = MemberState.ALIVE, True, 2

    def _silence(self, rank: int) -> None:
        name = self.peers[rank].name
        self.peers[rank].silence = (
            f"{name} has not averaged for 31 s (usually every 0.9 s): p05 opened no stream within "
            "2 s, 7 of the last 9 attempts"
        )

    def report_of(self, rank: int, *, members: bool = True) -> Report:
        peer = self.peers[rank]
        loss = 0.15 + 2.1 * math.exp(-self.now / 40) + 0.02 * math.sin(self.now + rank)
        return report(
            peer.name,
            *(self.members(but=rank) if members else ()),
            me=self._record(peer),
            running_s=self.now if peer.incarnation == 1 else self.now - 48,
            samples_per_s=peer.speed * (1 - peer.waits) * BATCH / STEP_S,
            wait_share=peer.waits,
            progress=int(self.now * self.count * BATCH / STEP_S),
            loss=loss,
            consensus_distance_l2=0.4 * math.exp(-self.now / 70) + 0.03,
            partners=peer.partners,
            groups_done=peer.groups,
            groups_failed=int(peer.groups * 0.02),
            silence=peer.silence,
        )

    def _record(self, peer: Made) -> dict[str, object]:
        steps = int(peer.steps)
        return {
            "steps": steps,
            "samples": steps * BATCH,
            "state": peer.state,
            "phase": peer.phase,
            "link_mbit": peer.link_mbit,
            "incarnation": peer.incarnation,
        }

    def members(self, but: int) -> tuple[Member, ...]:
        others = (p for rank, p in enumerate(self.peers) if rank != but)
        return tuple(member(peer.name, **self._record(peer)) for peer in others)

    def tell(self, view: SwarmView, now: Seconds) -> None:
        """All members, and the report of everyone that answers."""
        view.saw(self.members(but=-1), now)
        for rank, peer in enumerate(self.peers):
            if peer.answers:
                view.answered(self.report_of(rank, members=False), now)
            else:
                why = f"no connection to {peer.name}:4000 (asking for its report)"
                view.failed(PeerId(peer.name), why, now)


class MadeUpFeed:
    """Implements `Feed` with a made-up swarm: `past_s` of it at once, then in real time."""

    def __init__(self, view: SwarmView, swarm: MadeUpSwarm, past_s: Seconds = 0.0) -> None:
        self.is_watched = True
        self.why_not = ""
        self.interval_s = 0.5
        self._view = view
        self._swarm = swarm
        for _ in range(int(past_s)):
            self._step(1.0)
            self._view.tick(self._swarm.now)

    async def run(self) -> None:
        ticked = 0.0
        while True:
            self._step(0.25)
            ticked += 0.25
            if ticked >= 1.0:
                self._view.tick(self._swarm.now)
                ticked = 0.0
            await asyncio.sleep(0.25)

    def _step(self, seconds: Seconds) -> None:
        self._swarm.pass_time(seconds)
        self._swarm.tell(self._view, self._swarm.now)


class Clicks:
    """Implements `FaultControl` and carries nothing out but what a test looks at."""

    kinds = ("pause", "slow", "cut", "kill")

    def __init__(self) -> None:
        self.on: set[tuple[str, str]] = set()

    def apply(self, kind: str, peer: str) -> None:
        self.on.add((kind, peer))

    def revert(self, kind: str, peer: str) -> None:
        self.on.discard((kind, peer))

    def active(self):
        return frozenset(self.on)


@dataclass
class Answers:
    """Implements `Handler` and `Service` for one made-up peer behind a real port."""

    swarm: MadeUpSwarm
    rank: int
    addresses: list[Address]
    asked: int = 0
    _made_at: int = -1
    _made: tuple[Member, ...] = ()

    def handle_identify(self) -> Hello:
        return self.report().hello

    def report(self) -> Report:
        self.asked += 1
        made = self.swarm.report_of(self.rank, members=False)
        me = replace(made.hello.me, address=self.addresses[self.rank])
        return replace(made, members=self._others(), hello=replace(made.hello, me=me))

    def _others(self) -> tuple[Member, ...]:
        """Made once a second: a real peer keeps the records of others ready, too."""
        if int(self.swarm.now) != self._made_at:
            self._made_at = int(self.swarm.now)
            self._made = tuple(
                replace(one, address=self.addresses[int(one.peer[1:])])
                for one in self.swarm.members(but=self.rank)
            )
        return self._made


class Listening:
    """A made-up swarm behind real ports."""

    def __init__(self, swarm: MadeUpSwarm) -> None:
        self.addresses: list[Address] = []
        self.answers = [Answers(swarm, rank, self.addresses) for rank in range(swarm.count)]
        self.transports: list[GrpcTransport] = []

    async def start(self) -> None:
        for answers in self.answers:
            transport = GrpcTransport("127.0.0.1:0", "", GrpcConfig(data="grpc"))
            self.addresses.append(await transport.start(answers))
            transport.service = answers
            self.transports.append(transport)

    async def stop(self, ranks: list[int] | None = None) -> None:
        chosen = range(len(self.transports)) if ranks is None else ranks
        await asyncio.gather(*(self.transports[rank].close(0.0) for rank in chosen))


async def _serve_page(count: int, listen: str, past_s: Seconds, lab: bool) -> None:
    swarm = MadeUpSwarm(count, by_itself=True)
    faults = Clicks() if lab else None
    page = LivePage(PageConfig(listen=listen), lambda: swarm.now, faults=faults)
    async with page.serving() as url:
        view = SwarmView(0.0)
        page.show(view, MadeUpFeed(view, swarm, past_s), "made up")
        print(url, flush=True)
        await page.follow()


async def _serve_reports(count: int, seconds: Seconds) -> None:
    swarm = MadeUpSwarm(count)
    listening = Listening(swarm)
    await listening.start()
    print(listening.addresses[0], flush=True)
    began = reported = time.monotonic()
    cpu, asked = time.process_time(), 0
    while time.monotonic() - began < seconds:
        await asyncio.sleep(0.25)
        now = time.monotonic()
        if now - reported >= 5.0:
            more = sum(one.asked for one in listening.answers) - asked
            used_s = time.process_time() - cpu
            share, each_ms = used_s / (now - reported), 1000 * used_s / max(1, more)
            rate = more / (now - reported)
            print(f"{rate:.1f} reports/s, {share:.2%} of a core, {each_ms:.3f} ms each", flush=True)
            reported, cpu, asked = now, cpu + used_s, asked + more
    await listening.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--listen", default="127.0.0.1:9410")
    parser.add_argument("--past", type=float, default=55.0)
    parser.add_argument("--lab", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(_serve_reports(given.peers, given.seconds))
    else:
        asyncio.run(_serve_page(given.peers, given.listen, given.past, given.lab))


if __name__ == "__main__":
    main()
