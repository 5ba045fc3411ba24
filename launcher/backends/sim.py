"""Run peers in a virtual world, in this process; the world is in `p2plab.backends.sim_fleet`."""

from collections.abc import Sequence

from p2plab.backends.base import Fleet
from p2plab.external_baselines import EXTERNAL_BASELINES
from p2plab.scenario import LeftOut, Scenario, checkpoints_left_out, ways_left_out
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.net.grpc_config import GrpcConfig


class SimBackend:
    """Simulates fleets."""

    def refusal(self, algorithm: str) -> str:
        """External baselines are separate programs."""
        return "cannot be simulated" if algorithm in EXTERNAL_BASELINES else ""

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse steps without a price; see `p2plab.backends.base.Backend`."""
        if not scenario.pace.is_priced:
            raise ConfigError(
                f"{scenario.name} cannot be simulated: computing takes no virtual time, and its "
                "[pace] gives a step no price; set pace.min_step_ms, mean_ms, trace_ms or "
                "trace_file"
            )
        for device in scenario.devices:
            if device.device:
                raise ConfigError(
                    f"{scenario.name}: devices device = {device.device!r}: a simulation computes "
                    "on the processor; leave it out, or use --backend process"
                )
            if device.cpus is not None or device.memory_mb is not None:
                raise ConfigError(
                    f"{scenario.name}: a simulation has no processors and no memory to divide; "
                    "say with pace.stragglers who is slow, or use --backend docker"
                )
        why = "a simulation prices no transport, only the [link]"
        ways = ways_left_out(scenario, why, GrpcConfig().data)
        return (*ways, *checkpoints_left_out(scenario, "a simulation writes none"))

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Build a world of one peer per configuration."""
        from p2plab.backends.sim_fleet import SimFleet  # torch

        return SimFleet(scenario, configs)
