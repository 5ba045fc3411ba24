"""Attack three honest peers on this machine, and measure what it costs them (``make attack``).

The peers train a small model with AD-PSGD, a step each 20 ms, in processes of their own. Then come,
one after the other:

* **a stranger**, without credentials and, where we are root, of another user, that sends a million
  mutated messages and 100,000 well-formed ones: invented members, accusations, requests, groups
  that do not exist. Beside them it opens streams for such groups, a hundred at a time and peer,
  asks for the model, and asks to join from addresses where nothing listens;
* **a member**, which was let in, answers probes, grants its slot, moves nothing, and sends the same
  messages;
* **100 members that come and go**, each in a process of its own, every second one killed.

Claims: no peer crashes; no stranger gets a model; the slowest peer makes at least 0.9 of its steps
beside a stranger and beside comings and goings, 0.7 beside a lying member; a minute after each its
memory is what it was, within 30 MB, descriptors and threads too, and `p2ptrain status` shows who is
here and no other; what others made it write into its log is less than 1 MB.

Everything stays on 127.0.0.0/8, at a bounded rate.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from p2plab.bench.attacker import attack, visit
from p2plab.bench.victims import Usage, Victims
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.processes import Children, Process
from p2plab.harness.tables import table
from p2ptrain.console.status import look
from p2ptrain.core.messages import MemberState
from p2ptrain.ids import Seconds
from p2ptrain.net import wire
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig

PEERS = 3
MUTATED = 1_000_000
LIES = 100_000
RATE = 2000.0
"""Messages per second of one attacker, at most."""

SENDERS = 3
"""Processes of one attacker. Whether more of them send faster has not been measured alone."""

VISITS = 100
CALM_S: Seconds = 20.0
SETTLE_S: Seconds = 60.0
LIMIT_S: Seconds = 7200.0

STRANGER, MEMBER, VISITORS = "a stranger", "a lying member", "members that come and go"
LEAST_SPEED = {STRANGER: 0.9, MEMBER: 0.7, VISITORS: 0.9}
MOST_MB = 30.0
MOST_LOG_MB = 1.0
MOST_MORE = 16
"""Descriptors and threads: connections to three peers open and close."""


class Siege:
    """The victims, and one attack on them after another; `rows` holds what each cost."""

    def __init__(self, victims: Victims, settle_s: Seconds, calm_s: Seconds) -> None:
        self._victims = victims
        self._settle_s, self._calm_s = settle_s, calm_s
        self._hello = asyncio.run(self._identify())
        self.rows: list[Json] = []

    def attack(self, who: str, mutated: int, lies: int) -> None:
        """Let one attacker, in processes of its own, do its worst."""
        addresses = [victim.address for victim in self._victims.all]
        shares = (RATE / SENDERS, -(-mutated // SENDERS), -(-lies // SENDERS))
        work = (addresses, self._hello, who == MEMBER, *shares)

        def begin(children: Children) -> Callable[[], Json | None]:
            for number in range(SENDERS):
                children.start(attack, *work, number, SENDERS)
            rows: list[Json] = []

            def step() -> Json | None:
                rows.extend(children.poll())
                return _together(rows) if len(rows) == SENDERS else None

            return step

        self._measure(who, begin)

    def receive(self, visits: int) -> None:
        """Members come and go, two at a time; every second one is killed."""

        def begin(children: Children) -> Callable[[], Json | None]:
            numbers = iter(range(visits))
            running: list[Process] = []

            def step() -> Json | None:
                running[:] = [one for one in running if one.is_alive()]
                while len(running) < 2 and (number := next(numbers, None)) is not None:
                    host = self._victims.all[number % PEERS].address
                    stays = number % 2 == 0
                    name = f"visitor{number:03}"
                    running.append(children.start(visit, host, self._hello, name, stays))
                return None if running else {"sent": visits, "models_given": 0}

            return step

        self._measure(VISITORS, begin)

    def _measure(self, who: str, begin: Callable[[Children], Callable[[], Json | None]]) -> None:
        victims = self._victims
        calm, usage, log_bytes = victims.speed(self._calm_s), victims.settled_usage(), self._log()
        began, speeds = time.monotonic(), []
        with Children() as children:
            step = begin(children)
            result = step()
            while result is None:
                if time.monotonic() - began > LIMIT_S:
                    raise RuntimeError(f"{who}: not done within {LIMIT_S:.0f} s")
                speeds.append(victims.speed(min(5.0, self._calm_s)))
                result = step()
        took_s = time.monotonic() - began
        time.sleep(self._settle_s)
        after = victims.settled_usage()
        self.rows.append(
            {
                **result,
                "attack": who,
                "took_s": took_s,
                "calm_steps_per_s": calm,
                "steps_per_s": sum(speeds) / len(speeds),
                "speed": sum(speeds) / len(speeds) / calm,
                "crashes": victims.crashed,
                "log_mb": (self._log() - log_bytes) / 1e6,
                **_growth(usage, after),
                "strangers_in_status": self._strangers_in_status(),
            }
        )

    def _log(self) -> int:
        return self._victims.log_bytes()

    async def _identify(self) -> bytes:
        async with asking(self._victims.all[0].address, GrpcConfig()) as asker:
            return wire.encode_hello(await asker.identify(10.0))

    def _strangers_in_status(self) -> int:
        """Peers that `p2ptrain status` shows and are not here, and those that it does not show."""
        view = asyncio.run(look(self._victims.all[0].address, 10.0))
        shown = {row.member.peer for row in view.rows if row.member.state < MemberState.DEAD}
        return len(shown ^ {victim.name for victim in self._victims.all})


def _together(rows: list[Json]) -> Json:
    """What the senders of one attacker did."""
    return {what: sum(row[what] for row in rows) for what in ("sent", "models_given")}


def _growth(before: Usage, after: Usage) -> Json:
    return {
        "memory_mb": after.resident_mb - before.resident_mb,
        "descriptors": after.descriptors - before.descriptors,
        "threads": after.threads - before.threads,
    }


def claims_of(rows: list[Json]) -> list[Json]:
    """What has to hold of each attack."""
    claims = []
    for row in rows:
        who = row["attack"]
        bounds = [
            ("no peer crashes", "crashes", None, 0.0),
            ("steps per second, of undisturbed", "speed", LEAST_SPEED[who], None),
            ("memory a minute later, MB more", "memory_mb", None, MOST_MB),
            ("descriptors a minute later, more", "descriptors", None, float(MOST_MORE)),
            ("threads a minute later, more", "threads", None, float(MOST_MORE)),
            ("what it made them write, MB", "log_mb", None, MOST_LOG_MB),
            ("peers that status shows wrongly", "strangers_in_status", None, 0.0),
        ]
        if who == STRANGER and os.getuid() == 0:  # else it is of our own user, and no stranger
            bounds.append(("models given to a stranger", "models_given", None, 0.0))
        for text, metric, least, most in bounds:
            claim = Claim(f"{who}: {text}", metric, who, at_least=least, at_most=most)
            claims.append(claim.check(float(row[metric])))
    return claims


def main(
    out: Out = Path("runs/attack"),
    check: Check = False,
    quick: Quick = False,
    mutated: Annotated[int, typer.Option(help="Mutated messages of each attacker.")] = MUTATED,
    lies: Annotated[int, typer.Option(help="Well-formed messages of each attacker.")] = LIES,
    visits: Annotated[int, typer.Option(help="Members that come and go.")] = VISITS,
) -> None:
    """Attack three peers of this machine, and measure what it costs them."""
    bench = Bench(out, check=check, quick=quick)
    if quick:
        mutated, lies, visits = min(mutated, 450), min(lies, 150), min(visits, 2)
    calm_s, settle_s = (2.0, 2.0) if quick else (CALM_S, SETTLE_S)
    with Victims(PEERS, out / "victims") as victims, bench.progress("attacks", 3) as told:
        siege = Siege(victims, settle_s, calm_s)
        for who in (STRANGER, MEMBER):
            siege.attack(who, mutated, lies)
            told(who)
        siege.receive(visits)
        told(VISITORS)
        victims.stop()
    columns = {
        "attack": "{attack}",
        "sent": "{sent}",
        "seconds": "{took_s:.0f}",
        "steps/s": "{steps_per_s:.1f}",
        "undisturbed": "{calm_steps_per_s:.1f}",
        "memory MB": "{memory_mb:+.1f}",
        "descriptors": "{descriptors:+d}",
        "log MB": "{log_mb:.2f}",
        "models": "{models_given}",
    }
    bench.conclude(
        siege.rows,
        claims_of(siege.rows),
        [table("Three peers under attack, the slowest of them", siege.rows, columns)],
    )


if __name__ == "__main__":
    run_bench(main)
