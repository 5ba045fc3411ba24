"""Define the systems that are measured, one function each, run in P processes.

Every function averages one float32 vector of `numbers` numbers among `peers` processes repeatedly,
with a barrier before and after each round, and returns rank 0's time between the two barriers,
which is that of the slowest. They communicate over loopback.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from threading import Barrier, Event, Lock, Thread
from time import perf_counter
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import torch
import torch.distributed
import uvloop

from p2plab.bench.claimer import Claimer
from p2plab.harness.claims import Json
from p2plab.harness.processes import Children
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.tokens import SwarmKey
from p2ptrain.runtime.exchange import WINDOW
from p2ptrain.runtime.mix import squares
from p2ptrain.runtime.robust import blocks
from p2ptrain.vectors import Vector

T = TypeVar("T")

WARM_UP = 2
CHUNK_BYTES = 1 << 18
BARE_CHUNK = 1 << 18
"""Numbers in one chunk of `BareSockets`: as many as in our own."""

LIMIT_S: Seconds = 120.0
BENCH_KEY = SwarmKey(bytes(32))
"""Of the swarms whose connections are encrypted; all processes here are ours."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process among `peers`, and their shared objects."""

    rank: int
    peers: int
    numbers: int
    rounds: int
    folder: Path
    barrier: Barrier
    host: str = "127.0.0.1"
    """Where to listen."""

    def tell(self, value: str) -> None:
        """Publish a value for the other ranks."""
        partial_path = self.folder / f"{self.rank}.partial"
        partial_path.write_text(value, encoding="utf-8")
        partial_path.replace(self.folder / str(self.rank))

    def hear(self, rank: int) -> str:
        """The value that `rank` published; call it after a barrier."""
        return (self.folder / str(rank)).read_text(encoding="utf-8")

    def vector(self) -> Vector:
        """This rank's own numbers; the mean of all ranks is known: see `check`."""
        return np.full(self.numbers, self.rank, np.float32)

    def check(self, mean: float) -> None:
        """Raise AssertionError unless `mean` is that of all ranks."""
        expected = (self.peers - 1) / 2
        assert abs(mean - expected) < 1e-4, f"rank {self.rank} got {mean}, not {expected}"


@dataclass(frozen=True, slots=True)
class Round:
    """One average: the time between barriers, and the system's own figures."""

    whole_s: Seconds
    exchange_s: Seconds | None = None
    snapshot_s: Seconds | None = None
    apply_s: Seconds | None = None
    sent_bytes: int | None = None


System = Callable[[Worker], list[Round]]


def gloo(worker: Worker) -> list[Round]:
    """``torch.distributed``'s all_reduce on Gloo, with default settings."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{worker.folder}/gloo",
        rank=worker.rank,
        world_size=worker.peers,
    )
    rounds = []
    for _ in range(worker.rounds + WARM_UP):
        tensor = torch.from_numpy(worker.vector())
        worker.barrier.wait(LIMIT_S)
        started = perf_counter()
        torch.distributed.all_reduce(tensor)
        worker.barrier.wait(LIMIT_S)
        rounds.append(Round(perf_counter() - started))
        worker.check(float(tensor[-1]) / worker.peers)
    torch.distributed.destroy_process_group()
    return rounds[WARM_UP:]


def bare_grpc(worker: Worker) -> list[Round]:
    """A bidirectional exchange of the bytes that an all-reduce moves, with nothing around it."""
    return uvloop.run(_bare_grpc(worker))


async def _bare_grpc(worker: Worker) -> list[Round]:
    pairs = worker.peers // 2 * 2
    size = 4 * worker.numbers * 2 * (worker.peers - 1) // worker.peers
    data = bytes(CHUNK_BYTES)
    chunks = [data] * (size // CHUNK_BYTES) + [data[: size % CHUNK_BYTES]]

    async def write(call: Any) -> None:  # Any: grpc is untyped
        for chunk in chunks:
            await call.write(chunk)

    async def read(call: Any) -> None:  # Any: as above
        for chunk in chunks:
            assert len(await call.read()) == len(chunk)

    async def serve(_: Any, context: Any) -> None:  # Any: as above
        await asyncio.gather(write(context), read(context))

    server = grpc.aio.server()
    handlers = {"Exchange": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker.tell(f"127.0.0.1:{port}")
    await _meet(worker)
    rounds = []
    partner = worker.rank ^ 1 if worker.rank < pairs else worker.rank  # a third one idles
    async with grpc.aio.insecure_channel(worker.hear(partner)) as channel:
        for _ in range(worker.rounds + WARM_UP):
            await _meet(worker)
            started = perf_counter()
            if worker.rank < pairs and worker.rank % 2 == 0:
                call: Any = channel.stream_stream("/bench/Exchange")()  # Any: as above
                await asyncio.gather(write(call), read(call))
                await call.done_writing()
            await _meet(worker)
            rounds.append(Round(perf_counter() - started))
    await server.stop(None)
    return rounds[WARM_UP:]


class BareSockets:
    """The minimal work of our exchange: bytes, means, deltas, one check.

    Each member receives from and sends to each other one, in blocking threads that run Python once
    per chunk. There is no snapshot, no lock, no deadline and no validation: the fastest form of
    this pattern on this machine, as a baseline for our own sockets.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._others = [rank for rank in range(worker.peers) if rank != worker.rank]
        self._to, self._from = self._connect()
        self._shards = [worker.numbers * rank // worker.peers for rank in range(worker.peers + 1)]
        first, stop = self._shards[worker.rank : worker.rank + 2]
        self._own_S = [
            slice(at, min(at + BARE_CHUNK, stop)) for at in range(first, stop, BARE_CHUNK)
        ]
        self._handed = np.zeros(worker.numbers, np.float32)
        self._slots = {
            rank: [np.zeros(BARE_CHUNK, np.float32) for _ in range(WINDOW + 1)]
            for rank in self._others
        }

    def rounds(self) -> list[Round]:
        """Average repeatedly; the same for two members and for more."""
        worker, found = self._worker, []
        for _ in range(worker.rounds + WARM_UP):
            vector = worker.vector()
            worker.barrier.wait(LIMIT_S)
            started = perf_counter()
            self._average(vector)
            worker.barrier.wait(LIMIT_S)
            found.append(Round(perf_counter() - started))
            worker.check(float(vector[-1]) + worker.rank)
        return found[WARM_UP:]

    def _average(self, vector: Vector) -> None:
        self._reduced = [Event() for _ in self._own_S]
        self._missing = [len(self._others)] * len(self._own_S)
        self._lock = Lock()
        works = product((self._send, self._receive), self._others)
        threads = [Thread(target=work, args=(vector, rank)) for work, rank in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, vector: Vector, rank: int) -> None:
        self._to[rank].sendall(vector[slice(*self._shards[rank : rank + 2])].data.cast("B"))
        for reduced, at in zip(self._reduced, self._own_S, strict=True):
            reduced.wait()
            self._to[rank].sendall(self._handed[at].data.cast("B"))

    def _receive(self, vector: Vector, rank: int) -> None:
        slots = self._slots[rank]
        for index, at in enumerate(self._own_S):
            if index >= WINDOW:
                self._reduced[index - WINDOW].wait()
            self._fill(rank, slots[index % WINDOW][: at.stop - at.start])
            with self._lock:
                self._missing[index] -= 1
                is_last = not self._missing[index]
            if is_last:
                self._reduce(vector[at], self._handed[at], index % WINDOW)
                self._reduced[index].set()
        first, stop = self._shards[rank : rank + 2]
        for start in range(first, stop, BARE_CHUNK):
            own_S = vector[start : min(start + BARE_CHUNK, stop)]
            self._fill(rank, slots[WINDOW][: len(own_S)])
            self._take(slots[WINDOW], own_S)

    def _reduce(self, own_S: Vector, handed_S: Vector, slot: int) -> None:
        for at in blocks(len(own_S)):
            handed_B = handed_S[at]
            handed_B[:] = own_S[at]
            for slots in self._slots.values():
                np.add(handed_B, slots[slot][: len(own_S)][at], out=handed_B)
            np.divide(handed_B, np.float32(self._worker.peers), out=handed_B)
        self._take(handed_S, own_S)

    def _take(self, mean_S: Vector, own_S: Vector) -> None:
        for at in blocks(len(own_S)):
            np.subtract(mean_S[: len(own_S)][at], own_S[at], out=own_S[at])
            squares(own_S[at])

    def _fill(self, rank: int, into_S: Vector) -> None:
        memory = into_S.data.cast("B")
        while memory:
            memory = memory[self._from[rank].recv_into(memory, 0, socket.MSG_WAITALL) :]

    def _connect(self) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
        worker, came = self._worker, {}
        with socket.create_server((worker.host, 0)) as listening:
            worker.tell(str(listening.getsockname()[1]))
            worker.barrier.wait(LIMIT_S)
            to = {
                rank: socket.create_connection((worker.host, int(worker.hear(rank))))
                for rank in self._others
            }
            for connection in to.values():
                connection.sendall(bytes([worker.rank]))
            for _ in self._others:
                connection, _ = listening.accept()
                came[connection.recv(1)[0]] = connection
        for connection in (*to.values(), *came.values()):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return to, came


def bare_sockets(worker: Worker) -> list[Round]:
    """See `BareSockets`."""
    return BareSockets(worker).rounds()


def p2ptrain(
    worker: Worker, way: str, codec: str = "fp32", *, encrypted: bool = False
) -> list[Round]:
    """Our own whole average: lock, snapshot, exchange, reduce and delta, over one transport."""
    torch.set_num_threads(1)
    return uvloop.run(_p2ptrain(worker, way, codec, encrypted))


async def _p2ptrain(worker: Worker, way: str, codec: str, encrypted: bool) -> list[Round]:
    peer = Claimer(
        f"p{worker.rank}",
        worker.numbers,
        worker.rank,
        way,
        codec=codec,
        host=worker.host,
        peers=worker.peers,
        limit_s=LIMIT_S,
        key=BENCH_KEY if encrypted else None,
    )
    worker.tell(await peer.listen())
    await _meet(worker)
    await peer.join(*([worker.hear(0)] if worker.rank else []))
    others = [PeerId(f"p{rank}") for rank in range(worker.peers) if rank != worker.rank]
    for _ in range(WARM_UP):
        await _warm_up(worker, peer, others if worker.rank == 0 else ())
    rounds = []
    for _ in range(worker.rounds):
        peer.fill(worker.rank)
        await _meet(worker)
        started = perf_counter()
        if worker.rank == 0:
            await peer.average(others)
        record = await peer.next_group()
        await _meet(worker)
        whole_s = perf_counter() - started
        assert record["outcome"] == "done", record["reason"]
        rounds.append(
            Round(
                whole_s,
                record["exchange_s"] - record["snapshot_s"] - record["apply_s"],
                record["snapshot_s"],
                record["apply_s"],
                record["sent_bytes"],
            )
        )
        worker.check(peer.mean())
    await _meet(worker)
    await peer.leave()
    return rounds


async def _warm_up(worker: Worker, peer: Claimer, others: Sequence[PeerId]) -> None:
    """An average that is not measured, and may be repaired.

    The first average touches all of its memory for the first time and opens all connections. Eight
    peers on two cores need longer for that than the timeout of a peer without observations.
    """
    await _meet(worker)
    if others:
        await peer.average(others)
    await _meet(worker)
    await peer.settle()


async def _meet(worker: Worker) -> None:
    """Wait at the barrier without blocking the event loop."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, worker.barrier.wait, LIMIT_S)


SYSTEMS: dict[str, System] = {
    "gloo": gloo,
    "bare grpc": bare_grpc,
    "bare sockets": bare_sockets,
    "p2ptrain grpc": partial(p2ptrain, way="grpc"),
    "p2ptrain sockets": partial(p2ptrain, way="sockets"),
    "p2ptrain sealed": partial(p2ptrain, way="sockets", encrypted=True),
    "p2ptrain memory": partial(p2ptrain, way="memory"),
}


def run(system: System, peers: int, numbers: int, rounds: int) -> list[Round]:
    """Run `system` in `peers` processes; return the figures of the slowest, but the bytes of all.

    Raises:
        RuntimeError: if a process died; its error is on standard error.
    """
    found = in_processes(system, peers, numbers, rounds)
    return [together(rounds) for rounds in zip(*found, strict=True)]


def together(all_peers: Sequence[Round]) -> Round:
    """One round of a group: the slowest peer's times, and the mean of the bytes that peers sent.

    Where shards are unequal, a peer sends more than the mean or less, and all together the same.
    """
    slowest = max(all_peers, key=lambda one: one.whole_s)
    sent = [one.sent_bytes for one in all_peers if one.sent_bytes is not None]
    return replace(slowest, sent_bytes=round(fmean(sent)) if sent else None)


def medians_of(rounds: Sequence[Round]) -> Json:
    """The medians of all figures, and the slowest; None where the system does not report one."""
    found: Json = {"slowest_s": max(one.whole_s for one in rounds)}
    for field in fields(Round):
        values = [getattr(one, field.name) for one in rounds]
        found[field.name] = None if None in values else float(median(values))
    return found


def in_processes(
    work: Callable[[Worker], T], peers: int, numbers: int, rounds: int, *, spawned: bool = False
) -> list[T]:
    """Return the results of `work` in `peers` processes, unordered; raises what `run` does."""
    with Children(spawned=spawned) as children, TemporaryDirectory() as folder:
        barrier = children.context.Barrier(peers)
        for rank in range(peers):
            worker = Worker(rank, peers, numbers, rounds, Path(folder), barrier)
            children.start(_on_a_core, work, worker)
        return [children.result() for _ in range(peers)]


def _on_a_core(work: Callable[[Worker], T], worker: Worker) -> T:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker.rank % len(cores)]})  # or two could share a core
    return work(worker)
