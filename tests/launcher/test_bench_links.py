"""The benchmark of slow links: its claims, its mistakes, and that nothing is left behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from launcher.bench import links
from launcher.bench.claims import some_of
from launcher.bench.links import WAYS, Home, Row, claims_of, linked, print_rows, row_of
from launcher.bench.systems import Round
from p2ptrain.errors import ConfigError


def row(way: str, codec: str, exchange_s: float) -> Row:
    return Row(way, codec, 100, exchange_s, exchange_s + 0.1, exchange_s + 0.2, 100e6)


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
    assert (found.exchange_s, found.whole_s, found.slowest_s) == (0.9, 1.4, 5.5)
    assert found.mbit == pytest.approx(800 / 0.9)


def test_rows_are_printed_beside_float32():
    console = Console(record=True, width=100)
    print_rows(console, ROWS, 1000)
    text = console.export_text()
    assert "0.55" in text
    assert "100 MB, grpc, int8" in text


def test_what_a_benchmark_does_not_have_is_refused_beside_what_it_has():
    assert some_of("--ways", "grpc, sockets", WAYS) == ["grpc", "sockets"]
    with pytest.raises(ConfigError, match=r"^--ways has no 'tcp'; there are: sockets, grpc$"):
        some_of("--ways", "grpc,tcp", WAYS)


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split() if name.startswith(f"p2plink{os.getpid()}-")]


@pytest.fixture
def namespaces_may_be_made() -> None:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces take root and iproute2")
    try:
        with linked(100):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.sockets
@pytest.mark.usefixtures("namespaces_may_be_made")
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_link_is_there_while_it_is_used_and_gone_however_that_ends(ending: type[BaseException]):
    with pytest.raises(ending), linked(100) as (one, other):  # noqa: PT012 - ends inside
        assert {one.namespace, other.namespace} <= set(namespaces())
        inside = ("ip", "netns", "exec", one.namespace)
        shaped = subprocess.run(
            [*inside, "tc", "qdisc", "show"], check=True, capture_output=True, text=True
        )
        assert "100Mbit" in shaped.stdout
        raise ending
    assert one.namespace not in namespaces()
    assert other.namespace not in namespaces()


@pytest.mark.sockets
@pytest.mark.usefixtures("namespaces_may_be_made")
def test_a_link_that_comes_to_nothing_halfway_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    before = namespaces()

    def fails(homes: tuple[Home, Home], mbit: int) -> None:
        raise ConfigError("no")

    monkeypatch.setattr(links, "_join", fails)
    with pytest.raises(ConfigError, match="no"), linked(100):
        pass
    assert namespaces() == before


def test_where_there_is_no_root_that_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for tool in ("ip", "tc"):
        fake = tmp_path / tool
        fake.write_text("#!/bin/sh\necho 'Operation not\npermitted' >&2\nexit 1\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError) as caught, linked(100):
        pass
    expected = "cannot make a link on this machine; it takes root (Operation not permitted)"
    assert str(caught.value) == expected


def test_where_a_tool_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigError, match="there is no 'ip' command here; install iproute2"),
        linked(1),
    ):
        pass
