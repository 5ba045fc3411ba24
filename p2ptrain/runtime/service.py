"""Answer calls of non-members: a peer's status, settings, the consensus model, and a dial back.

The status has numbers and names, no parameters; settings and the model are for who has a member's
rights. A dial back opens a connection on behalf of a stranger, so it must not turn this peer into a
port scanner:

* it calls the IP address that the request came from, never one that the request names;
* it calls ports from `LOWEST_PORT` up, one at a time, none within `PAUSE_S` after another;
* it succeeds only if a peer answers there with the number that the caller chose. Any other ending
  is one sentence to the owner of that address.
"""

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.compute.replica import State
from p2ptrain.core import lock_state, scheduled
from p2ptrain.core.effects import Average, TakeState
from p2ptrain.core.messages import Phase
from p2ptrain.core.peer_machine import PeerMachine
from p2ptrain.errors import CodecError, RefusedError, StateError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.net.wire import DialBackRequest, DialedBack, Report, SetReply, SetRequest
from p2ptrain.runtime.admission import DIAL_BACK_S
from p2ptrain.runtime.board import Board
from p2ptrain.runtime.set_settings import answer

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

PAUSE_S: Seconds = 0.5
MAX_WAITING = 4
EXPORT_S: Seconds = 60.0
"""For so long at most a model that is asked for waits for its group."""


@dataclass
class PeerService:
    """Implements `Service` for one driver."""

    driver: "Driver"
    board: Board
    """Fed with the records of the same peer."""
    transport: Transport
    """The driver's."""

    def __post_init__(self) -> None:
        self._free_at: Seconds = -math.inf
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0
        self._exporting = asyncio.Lock()

    def report(self) -> Report:
        driver, board = self.driver, self.board
        samples_per_s, wait_share = board.recently()
        finite = board.loss is not None and math.isfinite(board.loss)
        return Report(
            hello=driver.handle_identify(),
            members=driver.machine.membership.others,
            unix_s=self.driver.environment.unix_clock(),  # the reader compares it with its own
            running_s=board.running_s,
            samples_per_s=samples_per_s,
            wait_share=wait_share,
            progress=driver.agreed.progress,
            doing=doing(driver.machine),
            loss=board.loss if finite else None,
            partners=board.partners,
            consensus_distance_l2=board.consensus_distance_l2,
            groups_done=board.groups_done,
            groups_failed=board.groups_failed,
            warning=board.warning,
            silence=board.silence,
            since_average_s=board.since_average_s,
            epoch=driver.live.epoch,
            settings=driver.live.words,
            changed_why=driver.machine.epochs.current.why,
            long_gone=driver.machine.membership.long_gone(driver.now),
            data=driver.dealing.counts() if driver.dealing else (),
        )

    def set(self, is_member: bool, request: SetRequest) -> SetReply:
        """Change the settings of the swarm; see `runtime/set_settings.py`."""
        return answer(self.driver, is_member, request)

    async def export(self, is_member: bool) -> State:
        """The mean of the models as they are, as a file of safetensors; one at a time.

        Raises RefusedError for who is no member, or while another one is on its way, and
        TransportError if no mean of all comes about, or there is no room for it.
        """
        driver = self.driver
        if not is_member:
            raise RefusedError(
                f"{driver.name} gives its model to members only, and in plain text it knows none: "
                "ask on the machine of the peer, or start the swarm with a token"
            )
        if self._exporting.locked():
            raise RefusedError(f"{driver.name} exports the model already; ask again soon")
        async with self._exporting:
            mean = await driver.consensus.now(EXPORT_S)
            about = {
                "mean_of": " ".join(mean.weights),
                "samples": str(driver.agreed.progress),
                "algorithm": driver.config.algorithm,
            }
            write = partial(driver.replica.model_file, mean.mean_M, about)
            try:
                return await driver.environment.executor(write)
            except StateError as error:
                raise TransportError(f"{driver.name}: {error}") from error
            finally:
                driver.averages.buffers.give(mean.mean_M)

    async def dial_back(self, caller_ip: str, request: DialBackRequest) -> DialedBack:
        """Try to reach the caller at its own IP address, and at no other.

        Raises:
            RefusedError: if too many others wait for the same.
        """
        if self._waiting >= MAX_WAITING:
            raise RefusedError(f"{self.driver.name} has many to call back; ask again soon")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                await asyncio.sleep(max(0.0, self._free_at - self.driver.now))
                try:
                    return DialedBack(caller_ip, await self._why_not(caller_ip, request))
                finally:
                    self._free_at = self.driver.now + PAUSE_S
        finally:
            self._waiting -= 1

    async def _why_not(self, ip: str, request: DialBackRequest) -> str:
        address = Address(f"[{ip}]:{request.port}" if ":" in ip else f"{ip}:{request.port}")
        try:
            there = await self.transport.identify(address, DIAL_BACK_S)
        except (TransportError, RefusedError, CodecError) as error:
            return str(error)
        finally:
            if all(m.address != address for m in self.driver.machine.membership.others):
                self.transport.forget(address)  # strangers leave no connections behind
        if there.me.incarnation != request.number:
            return f"at {address} is somebody else"
        return ""


def doing(machine: PeerMachine) -> str:
    """What a peer does at this moment, in a few words."""
    groups = machine.groups
    match groups.barrier.state:
        case scheduled.Arrival(version=version):
            return f"waits for the others at version {version}"
        case TakeState(version=version):
            return f"takes the state of version {version}"
        case Average(purpose=purpose):
            return f"averages version {purpose.version}"
        case None:
            pass
    match machine.membership.me.phase:
        case Phase.ARRIVING:
            return "waits for those it starts together with"
        case Phase.DONE:
            return "is done; serves the others"
        case Phase.TRAINING:
            arrival, group = groups.wait_avoiding.arrival, groups.wait_avoiding.group
            if arrival and arrival.waits:
                return f"waits to average version {arrival.version}"
            in_group = group or isinstance(groups.lock.state, lock_state.InGroup)
            return "trains, and averages" if in_group else "trains"
