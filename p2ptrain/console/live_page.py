"""Serve the live page of a swarm until Ctrl-C (`p2ptrain ui`)."""

from collections.abc import Callable

from rich.console import Console

from p2ptrain.ids import Address, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.ui.poller import FIRST_S
from p2ptrain.ui.server import LivePage, PageConfig


async def show_page(
    address: Address, config: PageConfig, clock: Callable[[], Seconds], network: GrpcConfig
) -> None:
    """Serve the page of the swarm of the peer at `address`, and print where it is.

    Raises:
        TransportError, RefusedError, CodecError: if no peer answers there at first; one that
            answers no more later is shown as such.
        ConfigError: if aiohttp is missing or the port is taken.
    """
    async with asking(address, network) as asker:
        await asker.report(FIRST_S)
    page = LivePage(config, clock, network)
    async with page.serving() as url:
        page.watch([address])
        Console(highlight=False).print(f"the swarm of {address}: {url}  (Ctrl-C ends it)")
        await page.follow()
