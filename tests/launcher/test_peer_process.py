"""What happens to real peers, on peers that only note what is done to them."""

import signal
from dataclasses import replace

import pytest

from p2plab.backends import peer_process
from p2plab.backends.peer_process import RealFleet
from p2plab.conditions import FaultConfig
from p2plab.faults import FaultPlan
from p2plab.records import PeerHistory
from p2plab.scenario import peer_names
from p2ptrain.config import StopConfig
from tests.launcher.fakes import UNIX_S, scenario


class NotedFleet(RealFleet):
    """Signals are noted; a peer that is killed or asked to end does so at once."""

    def __init__(self, chosen, folder):
        configs = chosen.configs("ad_psgd", folder)
        placed = [replace(one, advertise=f"127.0.0.1:{4000 + one.rank}") for one in configs]
        super().__init__(chosen, placed)
        self.rates: list[float | None] = []
        self.done: list[tuple[int, str]] = []
        self.codes: dict[int, int | None] = {}

    def pids(self):
        return []

    def stop(self, grace_s):
        """There is nothing to stop."""

    def _start(self, rank, file):
        self.codes[rank] = None
        self.done.append((rank, "start"))

    def _exit_code(self, rank):
        return self.codes[rank]

    def _last_words(self, rank):
        return ""

    def _change_network(self, instance, *, cuts):
        self.rates.append(self._narrowest(instance.ranks[0]))

    def _signal(self, rank, number):
        self.done.append((rank, number.name))
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.codes[rank] = -number if number is signal.SIGKILL else 0


@pytest.fixture
def lived(tmp_path, monkeypatch):
    """Lets faults hit three peers, second by second; gives what was done after the start."""

    def live(*faults, until=12):
        chosen = scenario(peers=3, faults=faults, stop=StopConfig(seconds=60.0))
        fleet = NotedFleet(chosen, tmp_path)
        fleet.begin()
        fleet.done.clear()
        histories = [PeerHistory(tmp_path, name) for name in peer_names(3)]
        plan, fleet.started_at = FaultPlan(faults), UNIX_S
        for second in range(until):
            now = UNIX_S + second
            monkeypatch.setattr(peer_process.time, "time", lambda now=now: now)
            plan.carry_out(fleet.apply, fleet.revert, histories, UNIX_S, now)
            fleet.poll()
        return fleet

    return live


def fault(kind, *, at_s, for_s=None, peer=1, **more):
    return FaultConfig(kind=kind, peers=(peer,), at_s=at_s, for_s=for_s, **more)


def test_who_is_paused_twice_at_a_time_goes_on_when_both_are_over(lived):
    twice = fault("pause", at_s=1.0, for_s=3.0), fault("pause", at_s=2.0, for_s=6.0)
    fleet = lived(*twice, until=8)
    assert fleet.done == [(1, "SIGSTOP")]
    assert lived(*twice).done == [(1, "SIGSTOP"), (1, "SIGCONT")]


def test_who_is_killed_while_it_stands_still_is_not_told_to_go_on(lived):
    fleet = lived(fault("pause", at_s=1.0, for_s=4.0), fault("crash", at_s=2.0, for_s=5.0))
    assert fleet.done == [(1, "SIGSTOP"), (1, "SIGKILL"), (1, "start")]


def test_who_is_to_leave_while_it_stands_still_is_let_go_on_first(lived):
    fleet = lived(fault("pause", at_s=1.0, for_s=4.0), fault("leave", at_s=2.0))
    assert fleet.done == [(1, "SIGSTOP"), (1, "SIGCONT"), (1, "SIGTERM")]


def test_of_two_slow_downs_at_a_time_the_slower_counts(lived, tmp_path):
    two = (
        fault("slow", at_s=1.0, for_s=6.0, factor=2.0),
        fault("slow", at_s=2.0, for_s=2.0, factor=5.0),
    )
    factors = []
    for until in (2, 3, 5, 8):
        lived(*two, until=until)
        files = list(tmp_path.rglob("*.slowdown"))
        factors.append([float(file.read_text()) for file in files])
    assert factors == [[2.0], [5.0], [2.0], []]


def test_of_two_throttles_at_a_time_the_narrower_counts(lived):
    two = (
        fault("throttle", at_s=1.0, for_s=6.0, mbit_s=5.0),
        fault("throttle", at_s=2.0, for_s=2.0, mbit_s=9.0),
    )
    assert lived(*two).rates == [5.0, 5.0, 5.0, None]


def test_when_all_have_crashed_those_who_are_to_come_back_are_waited_for(lived):
    everyone = [fault("crash", at_s=1.0, for_s=5.0, peer=rank) for rank in range(3)]
    assert [status.state for status in lived(*everyone, until=4).poll()] == ["running"] * 3
    assert lived(*everyone).done[3:] == [(0, "start"), (1, "start"), (2, "start")]
    for_good = [fault("crash", at_s=1.0, peer=rank) for rank in range(3)]
    assert [status.state for status in lived(*for_good, until=4).poll()] == ["lost"] * 3


def test_who_is_away_when_all_others_have_ended_is_not_waited_for(lived):
    fleet = lived(fault("crash", at_s=1.0, for_s=30.0), until=4)
    fleet.codes[0] = fleet.codes[2] = 0
    assert [status.state for status in fleet.poll()] == ["ended", "lost", "ended"]
