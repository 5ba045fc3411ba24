"""The benchmark of slow links: its claims, its mistakes, and that nothing is left behind."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2plab.bench.links import WAYS, claims_of, row_of, table_of
from p2plab.bench.systems import Round
from p2plab.harness import namespaces
from p2plab.harness.bench import some_of
from p2plab.harness.claims import Json
from p2plab.harness.namespaces import Home, laid
from p2plab.machine import TCP_SETTING
from p2ptrain.errors import ConfigError
from tests.launcher.conftest import printed


def row(way: str, codec: str, exchange_s: float) -> Json:
    one = Round(exchange_s + 0.1, exchange_s, sent_bytes=100_000_000)
    return row_of(way, codec, 100, [one])


ROWS = [
    row("sockets", "fp32", 1.0),
    row("sockets", "bf16", 0.55),
    row("sockets", "int8", 0.5),
    row("grpc", "int8", 0.2),
]


def test_a_codec_is_compared_with_float32_over_the_same_way():
    claims = claims_of(ROWS, 1000)
    assert [(one["of"], one["measured"], one["holds"]) for one in claims] == [
        ("sockets bf16", 0.55, True),
        ("sockets int8", 0.5, False),
    ]
    assert claims[0]["over"] == "sockets fp32"


def test_a_row_has_the_medians_of_its_rounds_and_the_speed_of_the_link():
    rounds = [Round(s + 0.5, s, sent_bytes=100_000_000) for s in (0.9, 0.8, 5.0)]
    found = row_of("grpc", "fp32", 100, rounds)
    assert [found[key] for key in ("exchange_s", "whole_s", "slowest_s")] == [0.9, 1.4, 5.5]
    assert found["mbit"] == pytest.approx(800 / 0.9)


def test_rows_are_printed_beside_float32():
    text = printed(table_of(ROWS, 1000))
    assert "0.55" in text
    assert "100 MB, grpc, int8" in text


def test_what_a_benchmark_does_not_have_is_refused_beside_what_it_has():
    assert some_of("--ways", "grpc, sockets", WAYS) == ["grpc", "sockets"]
    with pytest.raises(ConfigError, match=r"^--ways has no 'tcp'; there are: sockets, grpc$"):
        some_of("--ways", "grpc,tcp", WAYS)


def our_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split() if name.startswith(f"p2pcable{os.getpid()}-")]


@pytest.fixture
def namespaces_may_be_made() -> None:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces take root and iproute2")
    try:
        with laid(100):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.sockets
@pytest.mark.usefixtures("namespaces_may_be_made")
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_link_is_there_while_it_is_used_and_gone_however_that_ends(ending: type[BaseException]):
    with pytest.raises(ending), laid(100) as cable:  # noqa: PT012 - ends inside
        names = {home.namespace for home in (*cable.ends, cable.middle)}
        assert names == set(our_namespaces())
        inside = ("ip", "netns", "exec", cable.near.namespace)
        shaped = subprocess.run(
            [*inside, "tc", "qdisc", "show"], check=True, capture_output=True, text=True
        )
        assert "100Mbit" in shaped.stdout
        tcp = subprocess.run(
            [*inside, "cat", TCP_SETTING], check=True, capture_output=True, text=True
        )
        assert tcp.stdout == "reno\n", "whatever is the default of this host"
        raise ending
    assert our_namespaces() == []


DATAGRAM = """
import socket, sys
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(("", 4000))
one.settimeout(0.2)
one.connect((sys.argv[1], 4000))
print("done", flush=True)
for word in sys.stdin:
    try:
        one.send(word.encode()) if word.strip() else print(one.recv(99).decode(), end="")
    except TimeoutError:
        print("nothing")
    print("done", flush=True)
"""


@pytest.mark.sockets
@pytest.mark.usefixtures("namespaces_may_be_made")
def test_a_cable_that_is_cut_loses_what_is_sent_without_an_error_until_it_is_restored():
    with laid() as cable, ExitStack() as stack:
        ends = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        home.namespace,
                        sys.executable,
                        "-c",
                        DATAGRAM,
                        other.host,
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for home, other in zip(cable.ends, cable.ends[::-1], strict=True)
        ]
        assert [answers(end) for end in ends] == [[], []]  # both listen
        assert heard(ends, "before") == ["before"]
        cable.cut()
        assert heard(ends, "during") == ["nothing"]
        cable.restore()
        assert heard(ends, "after") == ["after"]


def heard(ends: list[subprocess.Popen[str]], word: str) -> list[str]:
    """What the second end hears of a word that the first one sends."""
    assert tell(ends[0], word) == []
    return tell(ends[1], "")


def tell(end: subprocess.Popen[str], word: str) -> list[str]:
    end.stdin.write(word + "\n")
    end.stdin.flush()
    return answers(end)


def answers(end: subprocess.Popen[str]) -> list[str]:
    """What an end prints until it is ready for the next word."""
    return list(iter(lambda: end.stdout.readline().strip(), "done"))


@pytest.mark.sockets
@pytest.mark.usefixtures("namespaces_may_be_made")
def test_a_link_that_comes_to_nothing_halfway_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    before = our_namespaces()

    def fails(home: Home, middle: Home, device: str) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(namespaces, "_connect", fails)
    with pytest.raises(ConfigError, match="no"), laid(100):
        pass
    assert our_namespaces() == before


def test_where_there_is_no_root_that_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for tool in ("ip", "tc"):
        fake = tmp_path / tool
        fake.write_text("#!/bin/sh\necho 'Operation not\npermitted' >&2\nexit 1\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError) as caught, laid(100):
        pass
    expected = "cannot make a link on this machine; it takes root (Operation not permitted)"
    assert str(caught.value) == expected


def test_where_a_tool_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigError, match="there is no 'ip' command here; install iproute2"),
        laid(1),
    ):
        pass
