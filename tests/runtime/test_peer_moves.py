"""A peer whose address changes while it trains, over real sockets: the old address is gone."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from p2plab.backends.spawn import free_ports
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.metrics import MemoryMetrics
from tests.runtime.test_peer import CLOCK, backward, peer_of, tiny

pytestmark = pytest.mark.sockets


class Forwarder:
    """Another address of a port of this machine, until it is closed."""

    def __init__(self, port: int) -> None:
        self._port, self._loop = port, asyncio.new_event_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        starting = asyncio.start_server(self._connect, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader, writer) -> None:
        self._connections.append(asyncio.current_task())
        there = await asyncio.open_connection("127.0.0.1", self._port)
        ways = ((reader, there[1]), (there[0], writer))
        tasks = [self._loop.create_task(self._carry(*way)) for way in ways]
        self._tasks += tasks
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.transport.abort()
        there[1].transport.abort()

    async def _carry(self, reader, writer) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


def test_a_peer_whose_address_changes_stays_a_member_and_goes_on_averaging():
    ports = free_ports(3)
    hosts = [f"127.0.0.1:{port}" for port in ports]
    old, new = Forwarder(ports[2]), Forwarder(ports[2])
    metrics = [MemoryMetrics(CLOCK) for _ in ports]
    moved = threading.Event()

    def train(rank: int) -> None:
        model, optimizer = tiny(rank)
        peer = peer_of(
            model,
            optimizer,
            metrics=metrics[rank],
            name=f"p{rank}",
            listen=hosts[rank],
            advertise=old.address if rank == 2 else "",
            join=hosts[:rank],
            algorithm="ad_psgd",
            network=GrpcConfig(data="grpc"),  # other ways lead past the forwarder
        )
        with peer:
            after = 0
            for step in range(2000):
                backward(model, 10 * step + rank)
                peer.step(samples=4)
                if rank == 2 and step == 40:
                    old.close()
                    peer.advertise(new.address)
                    moved.set()
                after += moved.is_set()
                if after == 150:
                    break
                time.sleep(0.005)  # real peers that compute: averages are made meanwhile

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(train, rank) for rank in range(3)]:
            future.result(60)
    new.close()
    for records in metrics[:2]:
        said = [record for record in records.of("member") if record["member"] == "p2"]
        told_at = next(r["t"] for r in said if f"is at {new.address} now" in r["why"])
        assert "dead" not in {record["state"] for record in said}
        outcomes = [
            group["outcome"]
            for group in records.of("group")
            if group["t"] > told_at + 0.1 and "p2" in group["members"]
        ]
        assert outcomes.count(Outcome.DONE) > 5


def test_a_peer_that_has_not_started_has_no_address_to_change():
    model, optimizer = tiny()
    peer = peer_of(model, optimizer, name="p0", metrics=MemoryMetrics(CLOCK))
    with pytest.raises(ConfigError, match="p0 has not started; give it advertise ="):
        peer.advertise("10.0.0.5:4000")


def test_an_address_that_cannot_be_one_is_refused_in_a_sentence():
    model, optimizer = tiny()
    with peer_of(model, optimizer, name="p0", metrics=MemoryMetrics(CLOCK)) as peer:
        before = peer.address
        with pytest.raises(ConfigError, match="p0 cannot advertise 'nowhere' is not an address"):
            peer.advertise("nowhere")
        assert peer.address == before
