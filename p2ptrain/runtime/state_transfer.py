"""Transfer state: a model to a peer that joins, a replica's whole state to one that fell behind.

Both sides buffer long states in unnamed files: many peers may ask one at a time, and a state may be
several times as large as the model, whose memory alone is budgeted (`compute/state.py`). Files and
models are accessed off the event loop, which must answer probes meanwhile. A transfer fails if
nothing arrives for `average_timeout_s`; then the receiver asks another donor, or arrives again.

Legend of shapes: ``M`` numbers of a model.
"""

import asyncio
import hashlib
import mmap
import tempfile
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.replica import Replica, State
from p2ptrain.core.effects import StateTransferred, TakeState
from p2ptrain.core.messages import MemberState
from p2ptrain.core.shards import Span, chunks
from p2ptrain.errors import CodecError, P2PTrainError, RefusedError, StateError, TransportError
from p2ptrain.ids import PeerId
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import StateOpening
from p2ptrain.runtime.agreed_state import AgreedState
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import ExchangeConfig

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

MAX_STATE_BYTES = 1 << 36
SMALL_BYTES = 1 << 20
"""Smaller states stay in memory: a simulated world has more peers than file descriptors."""


@dataclass(eq=False)
class StateTransfer:
    """Both sides of state transfers, for one peer."""

    host: "Driver"
    replica: Replica
    agreed: AgreedState
    _: KW_ONLY
    config: ExchangeConfig
    executor: CopyExecutor

    async def take_model(self) -> PeerId | None:
        """Take the model of a peer that already trains; returns that peer, or None.

        They are asked in an order that differs from peer to peer, by rendezvous hashing (Thaler and
        Ravishankar 1998): peers that join at the same time ask different donors.
        """
        others, me = self.host.machine.membership.others, self.host.name
        donors = [m.peer for m in others if m.state is MemberState.ALIVE and m.steps]
        donors.sort(key=lambda donor: hashlib.sha256(f"{me} {donor}".encode()).digest())
        for donor in donors:
            with suppress(TransportError, RefusedError, CodecError):
                data = await self.download(donor)
                if await self.executor(partial(self._adopt, data)):
                    return donor
                text = f"the model that {donor} handed over does not fit or is not finite"
                self.host.metrics.record("warning", text=text)
        return None

    def _adopt(self, data: State) -> bool:
        """Set our model to that in `data`; false, without effect, if there is none."""
        if len(data) != 4 * self.replica.model_size:
            return False
        theirs_M = np.frombuffer(data, dtype="<f4")
        if not np.isfinite(theirs_M).all():
            return False
        own_M = np.empty(self.replica.model_size, np.float32)
        self.replica.snapshot(own_M)
        self.replica.add_delta(np.subtract(theirs_M, own_M, out=own_M))
        self.replica.settle()
        return True

    async def catch_up(self, effect: TakeState) -> None:
        """Take the state of a peer that waits at a later version, or on another lineage."""
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
            self.host.over(StateTransferred(version, taken=False))
        else:
            self.agreed.contributes, self.agreed.lineage = False, effect.lineage
            self.host.over(StateTransferred(version, taken=True))

    async def download(self, donor: PeerId, version: int | None = None, lineage: int = 0) -> State:
        """The model of `donor` (M float32), or all of its state if a version is given.

        There is no bound on the whole, only on silence.

        Raises:
            TransportError, RefusedError, CodecError: if it did not arrive.
        """
        timeout_s, loop = self.config.average_timeout_s, asyncio.get_running_loop()
        most = MAX_STATE_BYTES if version is not None else 4 * self.replica.model_size
        stream = None
        try:
            with tempfile.SpooledTemporaryFile(SMALL_BYTES) as file:
                async with asyncio.timeout(timeout_s) as timeout:
                    opening = StateOpening(self.host.digest, self.host.name, version, lineage)
                    stream = await self.host.open_stream(donor, opening)
                    await stream.finish()
                    while (payload := await stream.receive()) is not None:
                        timeout.reschedule(loop.time() + timeout_s)
                        if file.tell() + payload.nbytes > most:
                            stream.abort("too much")
                            raise CodecError(f"{donor} sends more than {most} bytes")
                        await self.executor(partial(file.write, payload))
                return _contents(file)
        except OSError as error:
            why = f"there is no room in {tempfile.gettempdir()} for what {donor} sends: {error}"
            if isinstance(error, TimeoutError):
                why = f"{donor} has sent nothing of its state for {timeout_s:g} s"
            if stream:
                stream.abort(why)
            raise TransportError(why) from error

    async def serve(self, opening: StateOpening, stream: ChunkStream) -> None:
        """Send our model, or, while the trainer waits at the requested version, our state.

        Raises:
            RefusedError: if it does not wait there, or the state cannot be exported.
        """
        version = opening.version
        try:
            if version is None:
                if not self.host.machine.has_model:
                    raise RefusedError(f"{self.host.name} is itself about to take a model")
                state = await self.executor(self._model)
            else:
                self._refuse_unless_waiting(version, opening.lineage)
                state = await self.executor(self.replica.export_state)
                self._refuse_unless_waiting(version, opening.lineage)
        except (OSError, StateError) as error:
            raise RefusedError(f"{self.host.name} cannot hand over its state: {error}") from error
        for span in chunks(Span(0, len(state)), self.config.chunk_kib * 1024):
            await stream.send(memoryview(state)[span.start : span.stop])

    def _model(self) -> State:
        vector_M = np.empty(self.replica.model_size, np.float32)
        self.replica.snapshot(vector_M)
        with tempfile.SpooledTemporaryFile(SMALL_BYTES) as file:
            file.write(vector_M.data)
            return _contents(file)

    def _refuse_unless_waiting(self, version: int, lineage: int) -> None:
        if not self.host.machine.groups.barrier.waits_with(version, lineage):
            raise RefusedError(f"{self.host.name} does not stand still at version {version}")


def _contents(file: "tempfile.SpooledTemporaryFile[bytes]") -> State:
    """All that was written; it survives the file."""
    if file.tell() > SMALL_BYTES:
        file.flush()  # a mapping shows what the file has, not what its buffer has
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    file.seek(0)
    return file.read()
