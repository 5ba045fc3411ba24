"""Run peers as actors of a Ray cluster, one for each peer, spread over its nodes.

The cluster is that of ``RAY_ADDRESS``, or the one that this machine is a node of. p2ptrain has to
be installed on all of its nodes, with the extra ``[ray]``, in one release.

An actor reserves a processor for its peer, or as many as ``[[devices]]`` `cpus` says, `memory_mb`,
and a GPU if the peer's `device` is ``cuda``, which then is the only one that it sees. Ray places
actors by these numbers; it limits neither processors nor memory. An actor is an agent
(`p2plab.backends.agent`), which runs the peer as a process: it can be killed, paused and started
again. When a node is lost, so are its peers. Rejected: the peer inside of the actor, where no fault
could reach it and a crash would take the records with it.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from p2plab.backends.agent import Agent, Look
from p2plab.backends.base import Fleet, LaunchError
from p2plab.backends.remote import (
    AgentLost,
    RemoteFleet,
    refusal,
    refuse_what_is_not_ours,
    unenforced,
)
from p2plab.backends.spawn import PEER_COMMAND
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

CPUS = 1.0
"""What a peer reserves, if the scenario does not say."""

RESERVED = (("num_cpus", "CPU", "processors"), ("num_gpus", "GPU", "GPUs"))
"""What an actor reserves: the option, the cluster's word, and ours."""

START_S: Seconds = 120.0
"""An actor that has no place after so long gets none."""

ANSWER_S: Seconds = 30.0
"""A node without an answer for so long is lost."""

REACH_S: Seconds = 5.0

WHAT = "peers on a Ray cluster"


class RayBackend:
    """Starts an actor per peer, which starts its processes with `command`."""

    def __init__(self, command: Sequence[str] = PEER_COMMAND) -> None:
        self._command = tuple(command)

    def refusal(self, algorithm: str) -> str:
        """External baselines have programs of their own, and prices have no processes."""
        return refusal(algorithm, "on a Ray cluster")

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse what a cluster cannot do, or has no room for; see `p2plab.backends.base`."""
        refuse_what_is_not_ours(scenario, WHAT)
        _connect()
        there = _ray().cluster_resources()
        for option, resource, what in RESERVED:
            each = (_resources(scenario, rank).get(option, 0.0) for rank in range(scenario.peers))
            if (needed := sum(each)) > (have := there.get(resource, 0.0)):
                raise ConfigError(
                    f"{scenario.name} has {scenario.peers} peers, which reserve {needed:g} {what} "
                    f"of the Ray cluster, and it has {have:g}; add nodes, or let peers have less "
                    "by [[devices]]"
                )
        return unenforced(scenario, ("cpus", "memory_mb"), "no Ray cluster limits a link")

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start an actor for each configuration, and its peer."""

        def connect(rank: int, name: str) -> _Actor:
            return _Actor(name, self._command, _resources(scenario, rank))

        return RemoteFleet.started(scenario, configs, connect)


class RayAgent(Agent):
    """An agent that is an actor."""

    def place(self) -> tuple[str, str]:
        """Its node: the id, and the address."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


class _Actor:
    """The connection to an agent that is an actor."""

    def __init__(
        self,
        name: str,
        command: tuple[str, ...],
        resources: dict[str, Any],  # Any: Ray's options
    ) -> None:
        ray = _ray()
        options = {"scheduling_strategy": "SPREAD", "max_restarts": 0, **resources}
        self._actor = ray.remote(RayAgent).options(**options).remote(name, command)
        self._look: Any = None  # Any: the future of a look that was asked for
        self._name = name
        self._place: tuple[str, str] | None = None

    @property
    def host(self) -> str:
        """The address of its node; waits until it has one."""
        return self._placed()[1]

    def _placed(self) -> tuple[str, str]:
        if self._place is None:
            ray = _ray()
            try:
                self._place = ray.get(self._actor.place.remote(), timeout=START_S)
            except ray.exceptions.GetTimeoutError:
                raise LaunchError(
                    f"the Ray cluster had no place for {self._name} within {START_S:g} s; it is "
                    "used by others, or has no node that is large enough"
                ) from None
            except ray.exceptions.RayError as error:
                why = _reason(error)
                raise LaunchError(f"{self._name} cannot start on the Ray cluster: {why}") from None
        return self._place

    def call(self, method: str, *arguments: Any) -> Any:  # Any: of the agent's methods
        """Call a method of the agent's, and wait for its result."""
        ray = _ray()
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise self._lost(error) from None

    def news(self) -> Look | None:
        """The agent's next look, if it has come."""
        exceptions = _ray().exceptions
        if self._look is None:
            # A future: `ray.wait` without a time-out gives up each time what it has begun to fetch.
            self._look = self._actor.look.remote().future()
        if not self._look.done():
            return None
        future, self._look = self._look, None
        try:
            look = future.result()
        except exceptions.ActorUnavailableError:
            return None  # the cluster finds out whether its node is lost
        except exceptions.RayError as error:
            raise self._lost(error) from None
        assert isinstance(look, Look)
        return look

    def close(self) -> None:
        """End the agent, and with it the peer."""
        ray = _ray()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.close.remote(), timeout=REACH_S)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def _lost(self, error: Exception) -> AgentLost:
        node, host = self._place or ("", "no node yet")
        if node in {one["NodeID"] for one in _ray().nodes() if one["Alive"]}:
            return AgentLost(f"was lost with its actor on {host}: {_reason(error)}")
        return AgentLost(f"was on a node of the Ray cluster that died ({host})")


def _resources(scenario: Scenario, rank: int) -> dict[str, Any]:  # Any: Ray's options
    """What the actor of a peer reserves."""
    found: dict[str, Any] = {"num_cpus": CPUS}  # Any: Ray's options
    name = scenario.device
    for device in scenario.devices:
        if rank in device.peers:
            name = device.device or name
            found |= {} if device.cpus is None else {"num_cpus": device.cpus}
            found |= {} if device.memory_mb is None else {"memory": device.memory_mb << 20}
    return found | ({"num_gpus": 1} if name.partition(":")[0] == "cuda" else {})


def _ray() -> Any:  # Any: it has no types of its own
    """The package. Raises ConfigError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "--backend ray needs Ray; pip install 'p2ptrain[ray]', here and on all nodes"
        ) from None
    return ray


def _connect() -> None:
    """Connect this process to the cluster, once. Raises ConfigError if there is none."""
    ray = _ray()
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "auto")
    _check_reach(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = "no cluster runs here" if address == "auto" else _reason(error)
        raise ConfigError(
            f"there is no Ray cluster at {address}: {why}; start one with `ray start --head`, and "
            "name it by RAY_ADDRESS=host:port if this machine is none of its nodes"
        ) from None


def _check_reach(address: str) -> None:
    """Raises ConfigError if nothing answers at ``host:port``; Ray would look for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "//" in address:
        return  # ``auto``, or the address of another kind of client
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"there is no Ray cluster at RAY_ADDRESS={address}: {why}; start one with `ray start "
            "--head`, or name another one"
        ) from None


def _reason(error: Exception) -> str:
    """The last line of an error of Ray's, which has many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
