"""List the explorations: the small ones run in every test run, all with `make explore`."""

from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.wait_avoiding import Rule
from p2ptrain.sim.explore.scenario import Ask, Meets, Plan, Scenario, Visits

SHORT = LockConfig(lease_s=5.0, acquire_timeout_s=2.0, resend_s=1.0)
"""The smallest whole numbers that satisfy all relations, so that there are few moments."""

DRIFTING = LockConfig(lease_s=75.0, acquire_timeout_s=30.0, resend_s=15.0)
"""For clocks at rates of 3 and 5: exact in binary, and every resend falls on a tick."""

SLOW_AND_FAST = (3, 5)

A_TRIO = Ask("a", "bc", 2)
CROSSING = (A_TRIO, Ask("b", "ac", 2))
OVERLAPPING = (A_TRIO, Ask("b", "c", 1))
ANY_ONE = (Ask("a", "bc", 1), Ask("b", "ca", 1))
CIRCLE = (Ask("a", "b", 1), Ask("b", "c", 1), Ask("c", "a", 1))


def small() -> tuple[Scenario, ...]:
    """Scenarios of some seconds each."""
    return (
        Scenario(name="one", asks=(A_TRIO,), faults=2, config=SHORT),
        Scenario(name="crossing", asks=CROSSING, config=SHORT),
        Scenario(name="overlapping", asks=OVERLAPPING, faults=1, config=SHORT),
        Scenario(name="any", asks=ANY_ONE, config=SHORT),
        Scenario(name="circle", asks=CIRCLE, config=SHORT),
        Scenario(name="late", asks=(A_TRIO,), latency_ticks=None, copies=1, config=SHORT),
        Scenario(name="drift", asks=(A_TRIO,), faults=1, config=DRIFTING, rates=SLOW_AND_FAST),
        _with_trainers("barrier", (Meets("a", 1, 2), Meets("b", 1, 2)), slack=1, faults=1),
        _with_trainers("behind", (Meets("a", 2, 2), Meets("b", 1, 2)), slack=2, faults=1),
        _with_trainers("deputy", (Meets("a"), Meets("b"), Meets("c")), slack=3),
        _with_trainers("versions", (Visits("a", (1, 2)), Visits("b", (1, 2))), faults=1),
        _with_trainers(
            "bounded",
            (Visits("a", (1, 2)), Visits("b", (1, 2), waits=False)),
            plan=Plan(rule=Rule(limiter=1)),
            faults=1,
        ),
        _with_trainers(
            "claim-barrier", (Meets("a"), Meets("b")), asks=(Ask("b", "a", 1),), faults=1
        ),
        _with_trainers("mixed", (Meets("a"), Visits("b")), asks=(Ask("b", "a", 1),), slack=1),
    )


def large() -> tuple[Scenario, ...]:
    """Scenarios of minutes each; states shared with the small ones are counted again."""
    trio_and_pairs = (A_TRIO, *CIRCLE[1:])
    chain = (Ask("a", "b", 1), Ask("b", "c", 1), Ask("c", "d", 1))
    two_meet = (Meets("a"), Meets("b"), Visits("c"))
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
        _with_trainers("barrier-1", (Meets("a"), Meets("b"), Meets("c")), faults=1),
        _with_trainers("barrier-2", (Meets("a", 1, 2), Meets("b", 1, 2)), faults=2),
        _with_trainers("lines", (Meets("a", 1, 1, 7), Meets("b"), Meets("c")), slack=1),
        _with_trainers(
            "groups",
            (Visits("a", (1, 2)), Visits("b", (1, 2)), Visits("c", (1, 2))),
            plan=Plan(groups=("ab", "bc")),
        ),
        _with_trainers("mixed-1", (Meets("a"), Visits("b")), asks=(Ask("b", "a", 1),), faults=1),
        _with_trainers(
            "mixed-pairs", two_meet, asks=(Ask("a", "b", 1),), plan=Plan(groups=("bc",))
        ),
        _with_trainers("mixed-all", two_meet, asks=(Ask("a", "b", 1),)),
        _with_trainers(
            "mixed-last",
            (Visits("a"), Meets("b"), Meets("c")),
            asks=(Ask("a", "b", 1),),
        ),
    )


def _with_trainers(
    name: str,
    trainers: tuple[Meets | Visits, ...],
    *,
    asks: tuple[Ask, ...] = (),
    plan: Plan | None = None,
    slack: int = 0,
    faults: int = 0,
) -> Scenario:
    """Of the peers that have one; what is said again and alike joins what is in flight."""
    return Scenario(
        name=name,
        peers="".join(sorted(trainer.peer for trainer in trainers)),
        asks=asks,
        trainers=trainers,
        plan=plan or Plan(),
        slack=slack,
        faults=faults,
        copies=1,
        config=SHORT,
    )
