"""Keep a member's keys fresh: tell others what is new, expel who was revoked, renew certificates.

A fact that is new here goes to all members at once, the revoked one among them, so that an
honest one knows why it is out. Besides, a peer compares with one member per second, so that what
was lost comes within a few rounds, as in membership. A revoked member is out where that is known:
its calls are refused, what it has open is ended, and it counts as one that has left.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from p2ptrain.core.messages import Member, MembershipUpdates, MemberState
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.enrolment import renewed
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.tls import SwarmTls

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

SYNC_S: Seconds = 1.0
ASK_S: Seconds = 2.0
TRY_AGAIN_S: Seconds = 60.0
AT_ONCE = 16


class KeyCare:
    """Of one member; `driver` starts `repeat` when it has joined.

    Args:
        lasts_s: how long certificates last; they are renewed when half of that is over.
    """

    def __init__(
        self, driver: "Driver", transport: GrpcTransport, security: SwarmTls, lasts_s: Seconds
    ) -> None:
        self._driver = driver
        self._transport = transport
        self._security = security
        self._lasts_s = lasts_s
        self._rng = Random(f"keys/{driver.name}")
        self._told = b""
        self._expelled: set[str] = set()
        self._renew_at = security.identity.until_s - lasts_s / 2
        self._changed = asyncio.Event()
        security.keyring.changed = self._note

    def signers(self) -> Sequence[Address]:
        """Addresses of members that may have the CA's key."""
        ring = self._security.keyring
        return [member.address for member in self._here() if ring.may_sign(member.peer)]

    async def repeat(self) -> None:
        """Until the peer ends."""
        while True:
            await self._spread()
            self._expel()
            await self._maybe_renew()
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()

    def _here(self) -> list[Member]:
        others = self._driver.machine.membership.others
        return [member for member in others if member.state <= MemberState.SUSPECT]

    async def _spread(self) -> None:
        """Tell all if something is new; else compare with one."""
        self._changed.clear()
        here, digest = self._here(), self._security.keyring.digest
        if digest == self._told and here:
            here = [self._rng.choice(here)]
        self._told = digest
        for at in range(0, len(here), AT_ONCE):
            await asyncio.gather(*(self._compare(member) for member in here[at : at + AT_ONCE]))

    async def _compare(self, member: Member) -> None:
        ring = self._security.keyring
        with suppress(TransportError, RefusedError, CodecError):
            theirs, records = wire.decode_records(await self._sync(member, ()))
            if theirs == ring.digest:
                return
            ring.learn(records)
            if theirs != ring.digest:
                await self._sync(member, ring.records)

    async def _sync(self, member: Member, records: tuple[wire.Record, ...]) -> bytes:
        data = wire.encode_records(self._security.keyring.digest, records)
        return await self._transport.ask_keys(member.address, "Sync", data, ASK_S)

    def _expel(self) -> None:
        driver = self._driver
        for name in self._security.keyring.revoked:
            if name == driver.name:
                why = f"{name} is no member any more: its name was revoked (`p2ptrain keys revoke`)"
                driver.fail(RefusedError(why))
                continue
            if name in self._expelled:
                continue
            self._expelled.add(name)
            self._transport.expel(name)
        for member in self._here():
            if member.peer in self._expelled:
                farewell = MembershipUpdates((replace(member, state=MemberState.LEFT),))
                driver.machine.receive(member.peer, farewell, driver.now)  # in its stead
                self._transport.forget(member.address)
                driver.pump()

    async def _maybe_renew(self) -> None:
        now = self._driver.environment.unix_clock()
        if now < self._renew_at:
            return
        try:
            await renewed(
                self._security, self._transport.ask_keys, self.signers(), now, self._lasts_s
            )
        except (TransportError, RefusedError) as error:
            self._renew_at = now + min(TRY_AGAIN_S, self._lasts_s / 8)
            self._driver.metrics.record("warning", text=str(error))
        else:
            self._renew_at = now + self._lasts_s / 2
