"""Deal data to this peer's trainer, and keep the data ledger the same at all peers.

The trainer's side takes and counts (`core/dealing.py`); the protocol's side tells the others at
once, each share in a message of some 30 bytes to at most `FANOUT` peers, and merges what they tell.
What was lost on the way is repeated: every `REPEAT_S` each peer sends another one some of all
shares that it knows, in turn. A peer that joins asks for all of them before it takes any.

A peer's data are dealt only if its program asks for it (`Peer.deal`, `ElasticSampler`); peers that
do not deal pass over what others tell, and others hold the samples of such peers to be of no epoch.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from p2ptrain.core.data_ledger import DataLedger, DataPlan, EpochCount, Share
from p2ptrain.core.dealing import Dealer, Dealt
from p2ptrain.core.messages import MOST_SHARES, LedgerUpdate, MemberState, Phase
from p2ptrain.core.shards import Span, chunks
from p2ptrain.ids import PeerId, Seconds

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

FANOUT = 32
"""Peers that hear of a share at once; others when shares are repeated."""

AGAIN = 4
"""Of the shares told last so many are told once more, with the next ones: one may be lost."""

REPEAT_S: Seconds = 1.0
REPEATED = 256
"""Shares of one repetition, some 4 KB."""

ASK_S: Seconds = 0.5
ASKS = 6
"""A peer that joins asks so often, of so many donors, and waits so long for each."""


class DataDealing:
    """The data of one peer. Its methods may be called from any thread, unless they say otherwise.

    Args:
        plan: what is dealt.
        me: this peer.
        incarnation: of this peer's process.
    """

    def __init__(self, plan: DataPlan, me: PeerId, incarnation: int) -> None:
        self.plan = plan
        self._dealer = Dealer(DataLedger(plan), me, incarnation)
        self._me = me
        self._lock = threading.Lock()
        self._driver: Driver | None = None
        self._repeated: Iterator[Share] = iter(())
        self._heard_all = asyncio.Event()
        self._last: tuple[Share, ...] = ()
        self._objects_to: DataPlan | None = None

    @property
    def _ledger(self) -> DataLedger:
        return self._dealer.ledger

    # --- the trainer's side -----------------------------------------------------------------------

    def take(self, only: int | None = None) -> Dealt | None:
        """The next samples for this peer to train; None if epoch `only` has none left for it."""
        with self._lock:
            dealt = self._dealer.take(self._view(), only)
        self._tell()
        return dealt

    @property
    def taken(self) -> int:
        """Samples that were taken and are not trained yet."""
        return self._dealer.taken

    def trained(self, samples: int) -> tuple[Dealt, ...]:
        """A step is over, of the first so many samples that were taken; which those are."""
        with self._lock:
            spans = self._dealer.trained(samples)
        self._tell()
        return spans

    def give_back(self) -> None:
        """What was taken and is not trained will not be, by this peer: others may take it."""
        with self._lock:
            self._dealer.give_back()
        self._tell()

    def counts(self, most: int = 8) -> tuple[EpochCount, ...]:
        """How often samples were trained, of the last `most` epochs that have begun."""
        with self._lock:
            return self._ledger.counts(most)

    def state_dict(self) -> dict[str, object]:
        """The ledger, in what JSON can hold, as it is between two steps of this peer."""
        with self._lock:
            return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from `state_dict`. What was taken since is forgotten.

        Raises:
            StateError: if it is of other data; nothing has changed then.
        """
        with self._lock:
            self._ledger.load_state_dict(state)
            self._start_over()

    # --- the protocol's side ----------------------------------------------------------------------

    def bind(self, driver: "Driver") -> None:
        """The peer listens: tell others from now on. On the protocol's side, as all below."""
        self._driver = driver

    async def catch_up(self) -> None:
        """Ask peers that train for all that they know, and from now on repeat what we know."""
        driver = self._driver
        assert driver is not None
        others = [peer for peer in driver.machine.membership.donors() if self._trains(peer)]
        Random(f"{self._me}").shuffle(others)
        for peer in islice((others * ASKS), ASKS):
            driver.send(peer, LedgerUpdate(self.plan, asks=True))
            try:
                async with asyncio.timeout(ASK_S):
                    await self._heard_all.wait()
                break
            except TimeoutError:
                continue
        with self._lock:
            self._start_over()
        driver.start(self._repeat(driver, Random(f"{driver.config.seed}/{self._me}/data")))

    def receive(self, source: PeerId, update: LedgerUpdate) -> None:
        """Merge what another peer has told, and answer if it asks."""
        driver = self._driver
        assert driver is not None
        if update.plan != self.plan:
            if self._objects_to is None:
                self._objects_to = update.plan
                text = f"{source} deals {update.plan} and {self._me} {self.plan}: each deals alone"
                driver.metrics.record("warning", text=text)
            return
        with self._lock:
            if update.closed:
                self._ledger.jump(update.begin, update.closed)
            for share in update.shares:
                if share.peer != self._me or share.life != self._dealer.life:
                    self._ledger.merge(share)
            self._dealer.heard(self._view())
            everything = self._everything() if update.asks else ()
        if update.is_whole:
            self._heard_all.set()
        for answer in everything:
            driver.send(source, answer)
        self._tell()

    def _start_over(self) -> None:
        self._dealer.forget_taken()
        self._dealer.life = max(self._dealer.life, self._ledger.life_of(self._me) + 1)

    def _everything(self) -> Sequence[LedgerUpdate]:
        ledger, closed = self._ledger, tuple(self._ledger.closed.values())
        *packs, last = _packs(tuple(ledger.all_shares())) or [()]
        return [
            *(LedgerUpdate(self.plan, ledger.begin, pack) for pack in packs),
            LedgerUpdate(self.plan, ledger.begin, last, closed, is_whole=True),
        ]

    async def _repeat(self, driver: "Driver", rng: Random) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            if others := [peer for peer in self._view() if peer != self._me]:
                with self._lock:
                    update = self._some()
                driver.send(rng.choice(others), update)

    def _some(self) -> LedgerUpdate:
        """The next shares in turn, and what was closed last."""
        shares = tuple(islice(self._repeated, REPEATED))
        if len(shares) < REPEATED:
            self._repeated = iter(tuple(self._ledger.all_shares()))
            shares += tuple(islice(self._repeated, REPEATED - len(shares)))
        closed = tuple(islice(reversed(self._ledger.closed.values()), 8))
        return LedgerUpdate(self.plan, self._ledger.begin, shares, closed[::-1])

    def _tell(self) -> None:
        """From any side: the others hear at once of what is new of ours."""
        driver = self._driver
        if driver is None:
            return
        with self._lock:
            shares = self._dealer.take_told()
        if shares:
            again, self._last = self._last, shares[-AGAIN:]
            driver.environment.post(lambda: self._send(driver, (*again, *shares)))

    def _send(self, driver: "Driver", shares: tuple[Share, ...]) -> None:
        others = [peer for peer in self._view() if peer != self._me]
        if len(others) > FANOUT:
            first = shares[0]
            others = Random(f"{self._me}/{first.epoch}/{first.part}/{first.stop}").sample(
                others, FANOUT
            )
        for pack in _packs(shares):
            for peer in others:
                driver.send(peer, LedgerUpdate(self.plan, self._ledger.begin, pack))

    def _view(self) -> tuple[PeerId, ...]:
        """The peers that train, sorted, suspects and this one too."""
        if self._driver is None:
            return (self._me,)
        names = self._driver.machine.membership.participants()
        return tuple(peer for peer in names if peer == self._me or self._trains(peer))

    def _trains(self, peer: PeerId) -> bool:
        assert self._driver is not None
        member = self._driver.machine.membership.member(peer)
        if member is None or member.state > MemberState.SUSPECT:
            return False
        return member.phase is Phase.TRAINING and not member.only_serves


def _packs(shares: tuple[Share, ...]) -> list[tuple[Share, ...]]:
    """What fits into a message each."""
    spans = chunks(Span(0, len(shares)), MOST_SHARES)
    return [shares[span.start : span.stop] for span in spans]
