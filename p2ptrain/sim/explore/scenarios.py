"""The explorations: the small ones run in every test run, the full ones with `make explore`."""

from p2ptrain.core.lock_state import LockConfig
from p2ptrain.sim.explore.scenario import Ask, Scenario

SHORT = LockConfig(lease_s=5.0, acquire_timeout_s=2.0, resend_s=1.0)
"""The smallest whole numbers that a `LockConfig` allows: few moments, all relations kept."""

DRIFTING = LockConfig(lease_s=105.0, acquire_timeout_s=30.0, resend_s=15.0)
"""The clocks' extremes are as 3 to 5: exact in binary, and every resend falls on a tick."""

SLOW_AND_FAST = (3, 5)

A_TRIO = Ask("a", "bc", 2)
CROSSING = (A_TRIO, Ask("b", "ac", 2))
OVERLAPPING = (A_TRIO, Ask("b", "c", 1))
ANY_ONE = (Ask("a", "bc", 1), Ask("b", "ca", 1))
CIRCLE = (Ask("a", "b", 1), Ask("b", "c", 1), Ask("c", "a", 1))


def small() -> tuple[Scenario, ...]:
    """Some seconds each."""
    return (
        Scenario(name="one", asks=(A_TRIO,), faults=2, config=SHORT),
        Scenario(name="crossing", asks=CROSSING, config=SHORT),
        Scenario(name="overlapping", asks=OVERLAPPING, faults=1, config=SHORT),
        Scenario(name="any", asks=ANY_ONE, config=SHORT),
        Scenario(name="circle", asks=CIRCLE, config=SHORT),
        Scenario(name="late", asks=(A_TRIO,), latency_ticks=None, copies=1, config=SHORT),
        Scenario(name="drift", asks=(A_TRIO,), faults=1, config=DRIFTING, rates=SLOW_AND_FAST),
    )


def large() -> tuple[Scenario, ...]:
    """Minutes each; what they explore of the small ones is counted again."""
    trio_and_pairs = (A_TRIO, *CIRCLE[1:])
    chain = (Ask("a", "b", 1), Ask("b", "c", 1), Ask("c", "d", 1))
    return (
        Scenario(name="crossing-1", asks=CROSSING, faults=1, config=SHORT),
        Scenario(name="overlapping-2", asks=OVERLAPPING, faults=2, config=SHORT),
        Scenario(name="any-1", asks=ANY_ONE, faults=1, config=SHORT),
        Scenario(name="circle-1", asks=CIRCLE, faults=1, config=SHORT),
        Scenario(name="three", asks=trio_and_pairs, config=SHORT),
        Scenario(name="four-1", peers="abcd", asks=chain, faults=1, config=SHORT),
        Scenario(
            name="late-1", asks=(A_TRIO,), faults=1, latency_ticks=None, copies=1, config=SHORT
        ),
        Scenario(name="late-two", asks=CIRCLE[:2], latency_ticks=None, copies=1, config=SHORT),
        Scenario(name="drift-1", asks=OVERLAPPING, faults=1, config=DRIFTING, rates=SLOW_AND_FAST),
    )
