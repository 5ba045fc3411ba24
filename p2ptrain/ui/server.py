"""Serve the live page of a swarm, and nothing else.

===================  ===============================================================================
``GET /``            the page; its style and script are files of ours, and nothing is fetched
``GET /feed``        server-sent events: one ``snapshot``, then an ``update`` every `UPDATE_S`
``GET /state.json``  the same snapshot for programs
``POST /fault``      in the lab only: apply or revert a fault
===================  ===============================================================================

**Who may read it.** The page has no password, so it listens on loopback unless `is_public`
is set. A web site that a browser visits must not read it either: a request has to name this
machine in its Host header (which a DNS name that was pointed here does not), and a fault has to
come from the page itself (its Origin). What peers report is sent as JSON and shown as text.

**Slow readers.** Every page has a short queue. One that falls behind gets a new snapshot in place
of the updates that it missed.
"""

import asyncio
import contextlib
import importlib.util
import ipaddress
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.ui.faults import FaultControl
from p2ptrain.ui.poller import Poller
from p2ptrain.ui.swarm import SwarmView

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler, Middleware

UPDATE_S: Seconds = 0.5
MAX_PAGES = 32
BEHIND = 8
"""A page that has this many updates waiting gets a snapshot instead."""

START_S: Seconds = 60.0
"""The most time in which a page has to listen: a busy machine takes long to import a library."""

MAX_BODY = 1024

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/graph.js": ("graph.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
}

POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """Where a page listens."""

    listen: str = "127.0.0.1:9410"
    """``host:port``; port 0 takes a free one."""

    is_public: bool = False
    """Allow a host beyond this machine. The page has no password."""

    def __post_init__(self) -> None:
        self.where()

    def where(self) -> tuple[str, int]:
        """Host and port. Raises ConfigError if they cannot be used."""
        host, colon, port = self.listen.rpartition(":")
        host = host.strip("[]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{self.listen!r} is no place to listen; write host:port")
        if not self.is_public and not is_loopback(host):
            raise ConfigError(
                f"{self.listen} is open to other machines, and the page has no password; listen "
                "on 127.0.0.1 and reach it through ssh -L, or add --public"
            )
        return host, int(port)


def is_loopback(host: str) -> bool:
    """True for an address or a name of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(slots=True)
class _Page:
    """One open page."""

    queue: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(BEHIND))
    is_behind: bool = True
    """It needs a snapshot: it is new, or has missed updates."""


class Feed(Protocol):
    """Feeds a view, as `Poller` does; tests have others."""

    is_watched: bool
    """Set by the page: whether one is open."""

    @property
    def why_not(self) -> str:
        """Why no peer answers; empty if one does."""
        ...

    @property
    def interval_s(self) -> Seconds:
        """How often each peer is asked."""
        ...

    async def run(self) -> None:
        """Feed the view until cancelled."""
        ...


class LivePage:
    """Serves the page of one swarm at a time.

    Args:
        config: where it listens.
        clock: monotonic.
        network: the connections to peers.
        faults: how faults are applied; None: the page is read-only.
    """

    def __init__(
        self,
        config: PageConfig,
        clock: Callable[[], Seconds],
        network: GrpcConfig | None = None,
        faults: FaultControl | None = None,
    ) -> None:
        self.title = ""
        self.url = ""
        """Where it is; empty until it listens."""
        self._config = config
        self._clock = clock
        self._network = network or GrpcConfig()
        self._faults = faults
        self._view = SwarmView(clock())
        self._feed: Feed | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._pages: list[_Page] = []
        self._files = {path: _read(name) for path, (name, _) in FILES.items()}

    @property
    def view(self) -> SwarmView:
        """What is shown."""
        return self._view

    def watch(self, addresses: Iterable[Address], title: str = "") -> None:
        """Show the swarm of these peers from now on. Call it in the loop of `serving`."""
        view = SwarmView(self._clock())
        self.show(view, Poller(view, addresses, self._network, self._clock), title)

    def show(self, view: SwarmView, feed: Feed, title: str = "") -> None:
        """Show what `feed` tells `view` from now on."""
        if self._feeding is not None:
            self._feeding.cancel()
        self.title, self._view, self._feed = title, view, feed
        self._feeding = asyncio.create_task(feed.run())
        for page in self._pages:
            page.is_behind = True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen; yields the address of the page.

        Raises:
            ConfigError: if aiohttp is missing or the port is taken.
        """
        _check_aiohttp()
        from aiohttp import web

        app = web.Application(middlewares=[_guard(self._config)], client_max_size=MAX_BODY)
        for path, (_, kind) in FILES.items():
            app.router.add_get(path, _serve(self._files[path], kind))
        app.router.add_get("/feed", self._events)
        app.router.add_get("/state.json", self._state)
        if self._faults is not None:
            app.router.add_post("/fault", self._fault)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        host, port = self._config.where()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self._config.listen} ({error.strerror}); give another port, or "
                "port 0, which takes a free one"
            ) from error
        bound = runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        updates = asyncio.create_task(self._update())
        try:
            yield self.url
        finally:
            tasks = [updates, *([self._feeding] if self._feeding else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await runner.cleanup()

    async def follow(self) -> None:
        """Serve until cancelled. Raises what the poller raises, which would be a bug."""
        while True:
            if self._feeding is not None and self._feeding.done():
                await self._feeding
            await asyncio.sleep(UPDATE_S)

    # --- what is sent -----------------------------------------------------------------------------

    async def _update(self) -> None:
        while True:
            await asyncio.sleep(UPDATE_S)
            if self._feed:
                self._feed.is_watched = bool(self._pages)
            if self._faults:
                self._view.faults_are(self._faults.active(), self._clock())
            self._send_all()

    def _send_all(self) -> None:
        """The changes to all pages, and all there is to those that need it."""
        changes = self._view.take_update()
        if not self._pages:
            return
        update = _event("update", {**changes, **self._about()})
        snapshot = self._snapshot() if any(page.is_behind for page in self._pages) else b""
        for page in self._pages:
            if page.queue.full():
                while not page.queue.empty():
                    page.queue.get_nowait()
                page.is_behind = True
                continue  # the next time, when it may have caught up
            page.queue.put_nowait(snapshot if page.is_behind else update)
            page.is_behind = False

    def _snapshot(self) -> bytes:
        kinds = list(self._faults.kinds) if self._faults else []
        return _event("snapshot", {**self._view.snapshot(), **self._about(), "kinds": kinds})

    def _about(self) -> dict[str, Any]:  # Any: whatever JSON can hold
        feed = self._feed
        return {
            "title": self.title,
            "why_not": feed.why_not if feed else "",
            "every_s": round(feed.interval_s, 2) if feed else None,
        }

    # --- requests ---------------------------------------------------------------------------------

    async def _events(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import web

        if len(self._pages) >= MAX_PAGES:
            raise web.HTTPServiceUnavailable(text=f"{MAX_PAGES} pages are open already\n")
        headers = {**POLICY, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        page = _Page()
        self._pages.append(page)
        try:
            await response.prepare(request)
            while True:
                await response.write(await page.queue.get())
        except ConnectionError:
            pass
        finally:
            self._pages.remove(page)
        return response

    async def _state(self, _: "web.Request") -> "web.Response":
        from aiohttp import web

        state = {**self._view.snapshot(), **self._about()}
        return web.json_response(state, headers=POLICY)

    async def _fault(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        assert self._faults is not None  # else there is no such route
        try:
            order = await request.json()
            kind, peer, on = str(order["kind"]), str(order["peer"]), bool(order["on"])
        except (ValueError, TypeError, KeyError):
            raise web.HTTPBadRequest(text="a fault has kind, peer and on\n") from None
        if kind not in self._faults.kinds or PeerId(peer) not in self._view.peers:
            raise web.HTTPBadRequest(text="no such kind of fault, or no such peer\n")
        try:
            (self._faults.apply if on else self._faults.revert)(kind, peer)
        except ConfigError as error:
            raise web.HTTPConflict(text=f"{error}\n") from None
        return web.Response(status=204, headers=POLICY)


def _guard(config: PageConfig) -> "Middleware":
    """Refuse requests of other web sites."""
    from aiohttp import web

    @web.middleware
    async def guard(request: "web.Request", handler: "Handler") -> "web.StreamResponse":
        name = request.host.rpartition(":")[0] if _has_port(request.host) else request.host
        if not config.is_public and name not in (*LOCAL_NAMES, config.where()[0]):
            raise web.HTTPForbidden(text="this page is for this machine: open it at its address\n")
        if request.method == "POST":
            origin = request.headers.get("Origin", "")
            is_json = request.content_type == "application/json"
            if origin != f"http://{request.host}" or not is_json:
                raise web.HTTPForbidden(text="only the page itself may ask for that\n")
        return await handler(request)

    return guard


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdecimal()


def _serve(body: bytes, kind: str) -> "Handler":
    from aiohttp import web

    async def handle(_: "web.Request") -> "web.StreamResponse":
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=POLICY)

    return handle


def _read(name: str) -> bytes:
    return resources.files("p2ptrain.ui").joinpath("page", name).read_bytes()


def _event(name: str, data: Mapping[str, Any]) -> bytes:  # Any: whatever JSON can hold
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()


def _check_aiohttp() -> None:
    """Raises ConfigError if aiohttp, which only this file needs, is missing."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(
            "the live page needs aiohttp; install it with: pip install 'p2ptrain[ui]'"
        )


# --- in a thread of its own -----------------------------------------------------------------------


class PageThread:
    """A live page in a thread of its own, for programs that have no loop to spare."""

    def __init__(self, page: LivePage) -> None:
        self.page = page
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="p2ptrain-page", daemon=True)
        self._is_listening = threading.Event()
        self._stop = asyncio.Event()
        self._error: BaseException | None = None

    def start(self) -> str:
        """Listen; returns the address of the page. Raises ConfigError as `LivePage.serving`."""
        self._thread.start()
        if not self._is_listening.wait(START_S):
            raise ConfigError(f"the live page did not start within {START_S:g} s; try again")
        if self._error:
            raise self._error
        return self.page.url

    def watch(self, addresses: Iterable[Address], title: str = "") -> None:
        """Show the swarm of these peers from now on."""
        self._loop.call_soon_threadsafe(self.page.watch, list(addresses), title)

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Implements `Metrics` for a peer: nothing is taken, since the page asks for reports."""

    def close(self) -> None:
        """Close the page. May be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except ConfigError as error:
            self._error = error
        finally:
            self._is_listening.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with self.page.serving():
            self._is_listening.set()
            await self._stop.wait()


def page_of(address: Address, port: int, network: GrpcConfig) -> PageThread:
    """Serve the page of the swarm of the peer at `address`, on loopback, until closed.

    Raises:
        ConfigError: as `LivePage.serving`.
    """
    config = PageConfig(listen=f"127.0.0.1:{port}")
    thread = PageThread(LivePage(config, time.monotonic, network))
    print(f"the swarm of {address}: {thread.start()}", file=sys.stderr)
    thread.watch([address])
    return thread
