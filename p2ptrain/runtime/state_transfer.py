"""Transfer a replica's state to a peer that starts, joins, or fell behind.

A state travels as a *snapshot*, in chunks with hashes, from several peers at once
(`runtime/state_snapshots.py`, `runtime/state_download.py`). Here is decided which state a peer
needs, whom it asks first, and what it gives to others:

* **At a version of a barrier** all members wait with the same bits, so all of them are donors.
* **Where models differ** the snapshot of one donor is taken. Newcomers of the same minute ask the
  same donor first, so they share its snapshot and load it from each other, too; in another minute
  it is another donor's turn.
* **A fragment of the outer state** is the same at all that made the step: all are donors.

Files and models are accessed off the event loop, which must answer probes meanwhile. A source that
is silent for `average_timeout_s` is left; if none remains, the receiver asks another donor, or
arrives again, and keeps the chunks that it has. While it trains, a donor gives a share of its link
(`state_share`); where all wait for the receiver, all of it.
"""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.compute.replica import Replica, State
from p2ptrain.core.effects import StateTransferred, TakeState
from p2ptrain.core.links import SharedLink
from p2ptrain.errors import CodecError, P2PTrainError, RefusedError, StateError, TransportError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import StateOpening
from p2ptrain.net.wire_state import (
    MAX_STATE_BYTES,
    MOST_OTHERS,
    StateManifest,
    StateNews,
    decode_manifest,
    decode_request,
    encode_manifest,
    encode_news,
)
from p2ptrain.runtime.agreed_state import AgreedState
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.state_download import StateDownload
from p2ptrain.runtime.state_snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

TURN_S: Seconds = 60.0
"""So long one donor is asked first by all that join; then another one."""

ADVISED = 2
"""Chunks that one loader of a snapshot is advised to begin with."""

MOST_HELPERS = 3
"""Members of a barrier that are asked beside the donor."""

MOST_SERVED = 16
"""Transfers to one peer at a time: as many fragments as it may follow, and its model. Peers that
this one has not heard of share the transfers of one."""

HEARD_S: Seconds = 1.0
"""Beyond them one waits so long until this peer hears of it: of twenty that joined elsewhere a
moment ago it may know none yet. Shorter: the last of them load another model from another donor."""


@dataclass(eq=False)
class StateTransfer:
    """Both sides of state transfers, for one peer."""

    host: "Driver"
    replica: Replica
    agreed: AgreedState
    _: KW_ONLY
    config: ExchangeConfig
    executor: CopyExecutor
    _following: int | None = field(default=None, init=False)
    """The fragment of the outer state that is being taken over."""
    _follows: bool = field(default=False, init=False)
    _to_follow: dict[int, tuple[int, Sequence[PeerId]]] = field(default_factory=dict, init=False)
    """Those that wait for it: the step to take over, and from whom; the latest step is last."""
    _fails_since: Seconds | None = field(default=None, init=False)
    """Since when this peer has tried in vain to catch up; None if it has not."""
    _served: Counter[str] = field(default_factory=Counter, init=False)
    """Transfers under way, by their receivers."""
    sent_bytes: int = field(default=0, init=False)
    """Over links, to all receivers."""

    def __post_init__(self) -> None:
        chunk_bytes = self.config.chunk_kib * 1024
        self.snapshots = Snapshots(lambda: self.host.now, chunk_bytes, self.executor)
        self._link = SharedLink(self.config.state_share)

    async def take_model(self, version: int | None = None) -> PeerId | None:
        """Take the state of a peer that has the model; returns that peer, or None if none is here.

        With `version`, of one that has had the means of stale gradients up to that; all soon have,
        or it goes on without these means.
        They are asked in an order that follows from the minute, by rendezvous hashing (Thaler and
        Ravishankar 1998): peers that join at the same time ask the same donor first.

        Raises:
            P2PTrainError: if no state fits, or none arrives within `join_timeout_s`.
        """
        host, membership = self.host, self.host.machine.membership
        until = host.now + host.config.join_timeout_s
        # If no peer has trained, the donor's state may equal ours.
        trained = version or membership.samples
        digest = 0 if trained else await self.executor(self.replica.state_digest)
        while donors := membership.donors():
            errors: list[P2PTrainError] = []
            turn = str(host.environment.unix_clock() // TURN_S)
            for donor in sorted(donors, key=partial(_rendezvous, turn)):
                try:
                    state = await self.download(donor, version, digest)
                    if state or not digest:
                        take = partial(self.replica.import_state, state, whole=False)
                        why = await self.executor(take)
                        why = why and f", without its optimizer's state: {why}"
                        host.metrics.record("warning", text=f"took over the model of {donor}{why}")
                    return donor
                except P2PTrainError as error:
                    text = f"could not take over the model of {donor}: {error}"
                    if not version:  # or else most have not come to it yet
                        host.metrics.record("warning", text=text)
                    errors.append(type(error)(text))
            if version and (host.stopping or host.now > until or len(membership.trainees()) < 2):
                why = f"goes on without the means before version {version}: {errors[-1]}"
                host.metrics.record("warning", text=why)
                break
            if host.now > until or all(isinstance(error, StateError) for error in errors):
                raise errors[-1]
            await asyncio.sleep(0.1)
        return None

    async def catch_up(self, effect: TakeState) -> None:
        """Take the state of a peer that waits at a later version, or on another lineage.

        All others wait meanwhile. So a peer that has tried for `join_timeout_s` in vain, as with a
        full disk, ends with an error that says why, and they go on without it.
        """
        donor, version = effect.donor, effect.version
        try:
            state = await self.download(donor, version, effect.lineage)
            await self.executor(partial(self.replica.import_state, state))
            if self.replica.updates != version:
                raise StateError(f"{donor} gave the state of version {self.replica.updates}")
        except P2PTrainError as error:
            text = f"could not catch up with {donor} at version {version}: {error}"
            self.host.metrics.record("warning", text=text)
            await asyncio.sleep(0.1)
            self._give_up_in_time(error)
            self.host.over(StateTransferred(version, taken=False))
        else:
            self._fails_since = None
            self.agreed.contributes, self.agreed.lineage = False, effect.lineage
            if overlap := self.host.averages.overlap:
                overlap.drop("it has taken another model over")
            self.host.over(StateTransferred(version, taken=True))

    def _give_up_in_time(self, error: P2PTrainError) -> None:
        """Leave, if too much time has passed since the first failure."""
        host, most_s = self.host, self.host.config.join_timeout_s
        if self._fails_since is None:
            self._fails_since = host.now
        if host.now - self._fails_since >= most_s:
            why = f"{host.name} leaves, since it could not take over the state of the swarm within"
            host.fail(type(error)(f"{why} {most_s:g} s, and all others waited for it: {error}"))

    def follow(self, fragment: int, digest: int, donors: Sequence[PeerId]) -> None:
        """Take this fragment of the outer state over from one of `donors`, beside the trainer.

        As it is after the step that `digest` names, or later. One at a time, and of those that wait
        the one whose step was last: on a link that is slow for the model, all of them together
        would arrive after their next steps, and be out of date.
        """
        outer = self.host.averages.outer
        if outer and fragment != self._following:
            outer.forget_missed(fragment)
            self._to_follow.pop(fragment, None)
            self._to_follow[fragment] = digest, donors
        if not self._follows:
            self._follows = True
            self.host.start(self._follow_all())

    async def _follow_all(self) -> None:
        try:
            while self._to_follow:
                fragment, (digest, donors) = self._to_follow.popitem()
                self._following = fragment
                await self._follow(fragment, digest, donors)
        finally:
            self._follows, self._following = False, None

    async def _follow(self, fragment: int, digest: int, donors: Sequence[PeerId]) -> None:
        outer, me = self.host.averages.outer, self.host.name
        assert outer is not None
        for donor in sorted(donors, key=partial(_rendezvous, me)):
            try:
                state = await self.download(donor, None, digest, fragment)
                follows = await self.executor(partial(outer.take_over, fragment, state))
            except P2PTrainError as error:
                text = f"could not follow {donor} in fragment {fragment}: {error}"
                self.host.metrics.record("warning", text=text)  # tried again at its next step
                continue
            if not follows:
                text = f"goes on with {donor}, whose outer steps were others, and keeps its own"
                self.host.metrics.record("warning", text=text)
            return

    async def download(
        self,
        donor: PeerId,
        version: int | None = None,
        lineage: int = 0,
        fragment: int | None = None,
    ) -> State:
        """The state of `donor`, as it is or at a version; nothing, if `lineage` is its digest.

        With `fragment`, that one of its outer state, from the step on that `lineage` names.

        Only silence has a time limit, not the whole.

        Raises:
            TransportError, RefusedError, CodecError: if it did not arrive.
        """
        host, outer, timeout_s = self.host, self.host.averages.outer, self.config.average_timeout_s
        keeps_own = self.config.fresh_optimizer and host.algorithm.averages == "models"
        bare = keeps_own and fragment is None
        opening = StateOpening(host.digest, host.name, version, lineage, fragment, bare=bare)
        most = min(MAX_STATE_BYTES, self.replica.most_state_bytes)
        if outer and fragment is not None:
            most = outer.most_bytes(fragment)
        stream = await host.open_stream(donor, opening)
        try:
            async with asyncio.timeout(timeout_s):
                payload = await stream.receive()
            if payload is None:
                return b""
            manifest = decode_manifest(payload, most)
        except TimeoutError as error:
            why = f"{donor} has sent nothing of its state for {timeout_s:g} s"
            stream.abort(why)
            raise TransportError(why) from error
        except CodecError as error:
            stream.abort(str(error))
            raise CodecError(f"{donor} offers {error}") from error
        return await self._load(donor, stream, opening, manifest)

    async def _load(
        self, donor: PeerId, stream: ChunkStream, opening: StateOpening, manifest: StateManifest
    ) -> State:
        host, began_at = self.host, self.host.now
        helpers: list[PeerId] = []
        if opening.fragment is not None or (host.algorithm.in_step and opening.version is not None):
            others = [one for one in host.machine.membership.participants() if one != donor]
            helpers = sorted(others, key=partial(_rendezvous, host.name))[:MOST_HELPERS]
        timeout_s = self.config.average_timeout_s
        try:
            download = StateDownload(
                host,
                opening,
                manifest,
                self.snapshots,
                self.executor,
                timeout_s=timeout_s,
                helpers=helpers,
            )
            loaded = await download.run(donor, stream)
        except OSError as error:
            where = tempfile.gettempdir()
            why = f"there is no room in {where} for what {donor} sends: {error}"
            raise TransportError(why) from error
        if opening.fragment is None:
            self.agreed.restored_progress = manifest.progress
        host.metrics.record(
            "state",
            donor=donor,
            size_bytes=manifest.size,
            sources=loaded.bytes_of,
            again_bytes=loaded.again_bytes,
            duration_s=host.now - began_at,
        )
        return loaded.state

    async def serve(self, opening: StateOpening, stream: ChunkStream) -> None:
        """Send our state, at a requested version or, of stale gradients, not before it.

        At the version of a barrier only while the trainer waits there.

        Raises:
            RefusedError: if it does not, or the state cannot be exported.
        """
        sender = self._known(opening)
        if not sender and self._served[sender] >= MOST_SERVED:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARD_S):
                    while not (sender := self._known(opening)):
                        await self.host.wait_for_change()
        if self._served[sender] >= MOST_SERVED:
            whose = sender or f"{opening.sender} and others that it has not heard of"
            raise RefusedError(f"{self.host.name} has {MOST_SERVED} transfers of {whose} under way")
        self._served[sender] += 1
        try:
            await self._serve(opening, stream)
        finally:
            self._served[sender] -= 1
            self._served += Counter()  # without those that are at 0

    def _known(self, opening: StateOpening) -> str:
        """The caller's name, empty for a peer that this one has not heard of."""
        known = self.host.machine.membership.member(opening.sender)
        return known.peer if known else ""

    async def _serve(self, opening: StateOpening, stream: ChunkStream) -> None:
        try:
            snapshot = await self._snapshot(opening)
        except (OSError, StateError) as error:
            raise RefusedError(f"{self.host.name} cannot hand over its state: {error}") from error
        if snapshot is None:
            return
        with self.snapshots.loading(snapshot, opening.sender):
            if not opening.snapshot:
                manifest = replace(snapshot.manifest, progress=self.agreed.progress)
                await stream.send(memoryview(encode_manifest(manifest)))
            while (request := await self._next_request(stream)) is not None:
                await self._answer(request, opening, snapshot, stream)

    async def _next_request(self, stream: ChunkStream) -> memoryview | None:
        timeout_s = self.config.average_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await stream.receive()
        except TimeoutError as error:
            why = f"nothing of a state of {self.host.name} was asked for within {timeout_s:g} s"
            raise RefusedError(why) from error

    async def _answer(
        self, request: memoryview, opening: StateOpening, snapshot: Snapshot, stream: ChunkStream
    ) -> None:
        """Send one chunk, or news."""
        self.host.machine.membership.spoke(PeerId(opening.sender))
        count = len(snapshot.manifest.hashes)
        try:
            number = decode_request(request, count)
        except CodecError as error:
            raise RefusedError(f"{self.host.name} does not understand: {error}") from error
        if number is None:
            known = {opening.sender, self.host.name}
            others = [one for one in snapshot.loaders if one not in known]
            others.sort(key=partial(_rendezvous, opening.sender))
            shown, advised = tuple(others[:MOST_OTHERS]), snapshot.advise(ADVISED)
            news = StateNews(frozenset(snapshot.have), shown, advised)
            await stream.send(memoryview(encode_news(news, count)))
            return
        chunk = snapshot.chunk(number) if number in snapshot.have else memoryview(b"")
        if self.host.live.trains and not self._all_wait(opening) and not stream.is_local:
            mbit, size = self.host.me.link_mbit, chunk.nbytes * self.host.environment.stands_for
            await asyncio.sleep(self._link.wait_s(size, mbit, self.host.now))
        await stream.send(chunk)
        self.sent_bytes += 0 if stream.is_local else chunk.nbytes

    def _all_wait(self, opening: StateOpening) -> bool:
        """Whether the swarm stands still until this state has arrived."""
        return self.host.algorithm.in_step and opening.version is not None

    async def _snapshot(self, opening: StateOpening) -> Snapshot | None:
        """What was asked for; None if the caller has it.

        Raises:
            RefusedError: if it is not here.
            StateError: if it cannot be made.
        """
        version, lineage, fragment = opening.version, opening.lineage, opening.fragment
        wanted, name, make = opening.snapshot, self.host.name, self.snapshots.make
        if wanted and (held := self.snapshots.get(wanted)):
            return held
        if fragment is not None:
            digest = await self._made_step(fragment, lineage)
            export = partial(self._outer_state, fragment)
            made = await make(("outer", fragment, digest), export, is_one=True)
        elif self._all_wait(opening):
            assert version is not None
            self._refuse_unless_waiting(version, lineage)
            whole = partial(self.executor, self.replica.export_state)
            made = await make(("barrier", version, lineage), whole, is_one=True)
            self._refuse_unless_waiting(version, lineage)
        elif wanted:
            raise RefusedError(f"{name} does not have this snapshot of a state")
        else:
            if not self.host.machine.has_model:
                raise RefusedError(f"{name} is itself about to take a model")
            if (version or 0) > self.replica.version:
                raise RefusedError(f"{name} has not come to version {version}")
            if lineage and lineage == await self.executor(self.replica.state_digest):
                return None
            model = partial(self.replica.export_state, whole=False, bare=opening.bare)
            copied = partial(self.host.averages.whole, model)
            loader = opening.sender
            kind = "model", "without its optimizer" if opening.bare else "whole"
            made = await make(kind, copied, version=version or 0, loader=loader)
        if wanted and made.manifest.digest != wanted:
            raise RefusedError(f"the state of {name} is another one")
        return made

    async def _made_step(self, fragment: int, digest: int) -> int:
        """Wait for the step of this digest; returns that of the last one.

        Raises:
            RefusedError: if there is no outer state, or it does not come to that step.
        """
        outer, name = self.host.averages.outer, self.host.name
        if outer is None or not outer.has_begun or fragment >= outer.rule.fragments:
            raise RefusedError(f"{name} has no outer state of fragment {fragment}")
        history = outer.histories[fragment]
        try:
            async with asyncio.timeout(self.host.averages.transfers.arrivals.seconds):
                while digest not in history.digests:
                    await self.host.wait_for_change()  # our own group may end after theirs
        except TimeoutError as error:
            raise RefusedError(f"{name} has not made that step of fragment {fragment}") from error
        return history.digest

    async def _outer_state(self, fragment: int) -> State:
        assert self.host.averages.outer
        return await self.executor(partial(self.host.averages.outer.hand_over, fragment))

    def _refuse_unless_waiting(self, version: int, lineage: int) -> None:
        if not self.host.machine.groups.barrier.waits_with(version, lineage):
            raise RefusedError(f"{self.host.name} does not stand still at version {version}")


def _rendezvous(me: str, donor: PeerId) -> bytes:
    return hashlib.sha256(f"{me} {donor}".encode()).digest()
