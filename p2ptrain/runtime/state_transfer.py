"""Transfer a replica's state to a peer that starts, joins, or fell behind.

Both sides buffer long states in unnamed files: many peers may ask one at a time, and a state may be
several times as large as the model, whose memory alone is budgeted (`compute/state.py`). Files and
models are accessed off the event loop, which must answer probes meanwhile. A transfer fails if
nothing arrives for `average_timeout_s`; then the receiver asks another donor, or arrives again.
"""

import asyncio
import hashlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.compute.replica import Replica, State
from p2ptrain.compute.state_file import SMALL_BYTES, contents
from p2ptrain.core.effects import StateTransferred, TakeState
from p2ptrain.core.shards import Span, chunks
from p2ptrain.errors import CodecError, P2PTrainError, RefusedError, StateError, TransportError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import StateOpening
from p2ptrain.runtime.agreed_state import AgreedState
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import ExchangeConfig

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

MAX_STATE_BYTES = 1 << 36

MOST_SERVED = 16
"""Transfers to one peer at a time: as many fragments as it may follow, and its model."""


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

    async def take_model(self, version: int | None = None) -> PeerId | None:
        """Take the state of a peer that has the model; returns that peer, or None if none is here.

        With `version`, of one that has had the means of stale gradients up to that; all soon have,
        or it goes on without these means.
        They are asked in an order that differs from peer to peer, by rendezvous hashing (Thaler and
        Ravishankar 1998): peers that join at the same time ask different donors.

        Raises:
            P2PTrainError: if no state fits, or none arrives within `join_timeout_s`.
        """
        host, me, membership = self.host, self.host.name, self.host.machine.membership
        until = host.now + host.config.join_timeout_s
        # If no peer has trained, the donor's state may equal ours.
        trained = version or membership.samples
        digest = 0 if trained else await self.executor(self.replica.state_digest)
        while donors := membership.donors():
            errors: list[P2PTrainError] = []
            for donor in sorted(donors, key=lambda donor: _rendezvous(me, donor)):
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
        if fragment != self._following:
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
        for donor in sorted(donors, key=lambda one: _rendezvous(me, one)):
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
        timeout_s, loop, stream = self.config.average_timeout_s, asyncio.get_running_loop(), None
        outer, most = self.host.averages.outer, MAX_STATE_BYTES
        if outer and fragment is not None:
            most = outer.most_bytes(fragment)
        try:
            with tempfile.SpooledTemporaryFile(SMALL_BYTES) as file:
                async with asyncio.timeout(timeout_s) as timeout:
                    me = self.host.name
                    opening = StateOpening(self.host.digest, me, version, lineage, fragment)
                    stream = await self.host.open_stream(donor, opening)
                    await stream.finish()
                    while (payload := await stream.receive()) is not None:
                        timeout.reschedule(loop.time() + timeout_s)
                        if file.tell() + payload.nbytes > most:
                            stream.abort("too much")
                            raise CodecError(f"{donor} sends more than {most} bytes")
                        await self.executor(partial(file.write, payload))
                return contents(file)
        except OSError as error:
            why = f"there is no room in {tempfile.gettempdir()} for what {donor} sends: {error}"
            if isinstance(error, TimeoutError):
                why = f"{donor} has sent nothing of its state for {timeout_s:g} s"
            if stream:
                stream.abort(why)
            raise TransportError(why) from error

    async def serve(self, opening: StateOpening, stream: ChunkStream) -> None:
        """Send our state, at a requested version or, of stale gradients, not before it.

        At the version of a barrier only while the trainer waits there.

        Raises:
            RefusedError: if it does not, or the state cannot be exported.
        """
        name = self.host.name
        known = self.host.machine.membership.member(opening.sender)
        sender = known.peer if known else ""  # strangers share the transfers of one
        if self._served[sender] >= MOST_SERVED:
            raise RefusedError(f"{name} has {MOST_SERVED} transfers of {opening.sender} under way")
        self._served[sender] += 1
        try:
            await self._serve(opening, stream)
        finally:
            self._served[sender] -= 1
            self._served += Counter()  # without those that are at 0

    async def _serve(self, opening: StateOpening, stream: ChunkStream) -> None:
        version = opening.version
        try:
            if opening.fragment is not None:
                state: State = await self._outer_state(opening.fragment, opening.lineage)
            elif version is None or not self.host.algorithm.in_step:
                if not self.host.machine.has_model:
                    raise RefusedError(f"{self.host.name} is itself about to take a model")
                if (version or 0) > self.replica.version:
                    raise RefusedError(f"{self.host.name} has not come to version {version}")
                theirs, ours = opening.lineage, self.replica.state_digest
                if theirs and theirs == await self.executor(ours):
                    return
                export = partial(self.replica.export_state, whole=False)
                state = await self.host.averages.whole(export)
            else:
                self._refuse_unless_waiting(version, opening.lineage)
                state = await self.executor(self.replica.export_state)
                self._refuse_unless_waiting(version, opening.lineage)
        except (OSError, StateError) as error:
            raise RefusedError(f"{self.host.name} cannot hand over its state: {error}") from error
        for span in chunks(Span(0, len(state)), self.config.chunk_kib * 1024):
            await stream.send(memoryview(state)[span.start : span.stop])

    async def _outer_state(self, fragment: int, digest: int) -> State:
        """Raises RefusedError if there is none, or it does not come to the step of `digest`."""
        outer, name = self.host.averages.outer, self.host.name
        if outer is None or not outer.has_begun or fragment >= outer.rule.fragments:
            raise RefusedError(f"{name} has no outer state of fragment {fragment}")
        try:
            async with asyncio.timeout(self.host.averages.transfers.arrivals.seconds):
                while digest not in outer.histories[fragment].digests:
                    await self.host.wait_for_change()  # our own group may end after theirs
        except TimeoutError as error:
            raise RefusedError(f"{name} has not made that step of fragment {fragment}") from error
        return await self.executor(partial(outer.hand_over, fragment))

    def _refuse_unless_waiting(self, version: int, lineage: int) -> None:
        if not self.host.machine.groups.barrier.waits_with(version, lineage):
            raise RefusedError(f"{self.host.name} does not stand still at version {version}")


def _rendezvous(me: PeerId, donor: PeerId) -> bytes:
    return hashlib.sha256(f"{me} {donor}".encode()).digest()
