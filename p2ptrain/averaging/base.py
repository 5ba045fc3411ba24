"""The contract of an averaging algorithm, and how one is found by its name.

An algorithm is a class in a file of its own, written against one port, the `Swarm`. It decides with
which peers, when, and what to average; it imports neither asyncio nor torch nor grpc, so it reads
like the paper. It acts at the moments that it defines, and leaves the others alone:

* `after_backward`  gradients are ready, the optimizer has not run; the trainer waits for it.
* `after_update`    the optimizer has run; the trainer waits, or goes on beside it: `trainer_waits`.
* `background`      a loop of its own beside the trainer, which never waits for it.
* `average`         it is in a group that is formed: reduce, commit, or a rule of its own.
* `take_in`         means of gradients wait for its trainer: which of them it takes in.
* `handle_message`  a message of the same algorithm on another peer arrives (`Swarm.tell`).
* `handle_push`     another peer has pushed a share of its model here (`Swarm.push`).

It declares what others must know of it (`averages`, `compresses`, `trainer_waits`, `in_step`,
`overlaps`, `conserves_mean`, `pushes_shares`): the boundary, the simulator's checkers and the
contract tests read these and infer nothing.

An algorithm whose groups follow from the version and the peers that train has a `schedule` as well:
then versions run in whole groups while some of their trainers compute (`core/wait_avoiding.py`).

The file's name is the configuration name; ``"package.module:Class"`` loads one from anywhere.
Options are the fields of the class's nested frozen dataclass `Config`. All that an algorithm needs
comes by one import, of `p2ptrain.averaging`.
"""

import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

from p2ptrain.core.choice import Choice
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.core.wait_avoiding import Round
from p2ptrain.errors import ConfigError, RemoteProtocolError, StateError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.named import check_options, module_of, modules_of

PACKAGE = "p2ptrain.averaging"

MOST_ASKED = 64
"""A peer has so many candidates for one exchange, at most: one of them will be free soon."""


MOST_BUCKET_MIB = 1024
"""As large as a model that would not overlap with anything."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """How an attempt to average with others ended."""

    outcome: Outcome
    why: str
    members: tuple[PeerId, ...] = ()
    """Of a claimed group, with this peer; the peers that were asked, if it was never formed."""

    @property
    def done(self) -> bool:
        return self.outcome is Outcome.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one peer has measured of itself in its last steps and averages."""

    step_s: Seconds = 0
    """Computing of a step, the mean; 0: no step yet."""
    spread_s: Seconds = 0
    """Its standard deviation."""
    samples: int = 0
    """Of a step."""
    model_s: Seconds = 0
    """As long as averages took for as many bytes as a model has; 0: no average yet."""
    apart: float = 0
    """How far its model was from the means of its groups, over the norm of a model; 0: unknown."""
    loss: float | None = None
    factors: Mapping[int, float] = field(default_factory=dict)
    """By rank, the share of a gradient's numbers that its factors have (`powersgd`)."""


class Swarm(Protocol):
    """What an algorithm can see and ask for."""

    @property
    def me(self) -> PeerId: ...

    @property
    def rng(self) -> Random:
        """This peer's own seeded randomness."""

    @property
    def now(self) -> Seconds:
        """On this peer's own clock."""

    @property
    def incarnation(self) -> int:
        """Of this life of the peer: larger than that of any earlier one."""

    @property
    def trains(self) -> bool:
        """False once the trainer is done, or is to stop: then no group is of our own wish."""

    @property
    def updates(self) -> int:
        """Optimizer updates that this peer's model has had."""

    def alive(self) -> tuple[PeerId, ...]:
        """The other peers that are alive by all we know, sorted."""

    def choosable(self) -> tuple[PeerId, ...]:
        """Those of them that may be asked into a group: all that do not load a model, sorted."""

    def trainees(self) -> tuple[PeerId, ...]:
        """This peer, and all others that train by all we know, sorted."""

    def only_serves(self, peer: PeerId) -> bool:
        """Whether one of them takes steps in step with the others, and trains nothing itself."""

    def participants(self) -> tuple[PeerId, ...]:
        """This peer, and all others that train or are to, also those that are suspect, sorted."""

    def met(self) -> Mapping[PeerId, int]:
        """The peers that we have been in a group with: the number of the last such group."""

    def link_mbit(self, peer: PeerId) -> int:
        """What the link of a peer carries, as configured or measured there; 0: not known."""

    @property
    def rounds(self) -> int:
        """How often each number of this model has been averaged, in whole models or fragments."""

    async def form(
        self,
        candidates: Sequence[PeerId],
        count: int | None = None,
        *,
        fragment_s: Seconds = 0,
    ) -> GroupResult:
        """Claim a group with the first `count` of `candidates` that are free, or all of them.

        It averages models, in delta form: `DONE` is in the model, or pending until the trainer's
        next boundary. With `fragment_s` it averages a fragment of them that moves in about so many
        seconds, by what groups with these peers took: the next one in turn. In a pair each
        candidate is asked for a fragment of its own size; of a larger group, slow candidates are
        not asked if there are enough others.
        Candidates are asked in this order, several at once; a busy one is waited for if too few
        others are free. While this peer is in another group, the claim waits; it ends with
        `YIELDED` if it gives way to an older one that includes this peer. An attempt that cannot
        start (too few candidates, or the peer stops) takes a moment, so no loop spins.
        """

    async def form_everyone(self) -> GroupResult:
        """Average gradients with all peers that train; they wait for each other.

        `DONE`, or `WITHDRAWN` when the trainer stops meanwhile: broken groups are assembled again.
        """

    @property
    def version(self) -> int:
        """The last version of the schedule that has begun, as far as we know; 0 before any has."""

    async def form_at(self, version: int) -> GroupResult:
        """Arrive at a version of the schedule and wait until it has run.

        `DONE`: the result is in the model or, of gradients, taken in at this boundary. `LATE`, at
        once: it has run without this trainer. Anything else: it broke and changed nothing here.
        """

    def pass_by(self, version: int) -> None:
        """Say that the trainer is not far behind a version, and do not wait for it."""

    async def push(self, peer: PeerId, share: float, clock: int) -> GroupResult:
        """Send a share of this model to one peer, which takes it in: push-sum, no group.

        Both keep weights of their models, so that the weighted sum of all stays what it is. `clock`
        comes to the other side's `handle_push`. `DONE`: it was taken in; anything else: it came
        back, or has gone with a peer that died. To one peer one share is on its way at a time.
        """

    async def exchange_updates(self, servers: Sequence[PeerId], share: float) -> None:
        """Push what was trained to the `servers` of the model's parts, and take their answers in.

        This `share` of it counts there. What a server cannot be brought stays for the next time.
        """

    async def wait_for_update(self, count: int) -> int:
        """Wait until the trainer has made `count` updates in this run; return how many it has."""

    async def wait_for_change(self, most_s: Seconds) -> None:
        """Wait until anything may have changed (a message, a member, a group), or so long."""

    async def pause(self, duration_s: Seconds) -> None:
        """Let time pass."""

    def tell(self, peer: PeerId, message: AlgorithmMessage) -> None:
        """Send a message to the same algorithm on another peer: to its `handle_message`.

        Best effort: it may be lost, delayed, sent twice or overtaken. Say there what a loss costs.
        """

    def start(self, activity: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        """Run this beside the trainer and everything else; cancelled when the peer leaves."""

    async def measure(self) -> Measured:
        """What this peer has measured of itself lately."""

    @property
    def codecs(self) -> tuple[str, str]:
        """How models travel in this swarm, and how gradients do."""

    @property
    def settings_changes(self) -> int:
        """How often the swarm has changed its settings."""

    def change_settings(self, choice: Choice, why: str) -> None:
        """Propose other settings to the whole swarm, for a reason in one sentence.

        All peers follow, this one too: what runs here ends, and a new algorithm begins.

        Raises:
            ConfigError: for settings that cannot work here; nothing is changed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRule:
    """An outer optimizer, which makes a step of what peers trained since the last one.

    x0 - x, where x0 is the model after the last step, is a peer's *pseudo-gradient*.
    """

    learning_rate: float
    momentum: float
    nesterov: bool = True
    """The step looks ahead by the momentum; else it is the momentum."""
    fragments: int = 1
    """Parts of the model that have steps of their own."""
    alpha: float = 0.0
    """The share of its own model that a peer keeps at a step."""


class Mean(Protocol):
    """A mean of models that a member keeps instead of taking it in; it can be added once."""

    async def add(self, share: float) -> None:
        """Change the model as it is at this moment, x <- x + `share` * (mean - x)."""


class Entries(Protocol):
    """Some numbers of a vector with their indices, which increase; 8 bytes each as they travel."""

    def __len__(self) -> int: ...

    @property
    def least(self) -> float:
        """The smallest magnitude; 0 of none."""

    def split(self, counts: Sequence[int]) -> "Sequence[Entries]":
        """The first so many, the next so many, ..."""

    def cut(self, edges: Sequence[int]) -> "Sequence[Entries]":
        """Those with indices before the first edge, from there to the second, ..., and the rest."""

    def quantiles(self, count: int, offset: float) -> Sequence[int]:
        """How many these are, then `count` of their indices, evenly spaced; 0 if there are none.

        `offset`, from 0 to 1, shifts the places.
        """

    def histogram(self) -> Sequence[int]:
        """How many there are by magnitude: the highest bin, how many it has, and those below it."""

    def largest(self, count: int) -> "Entries":
        """Those of the largest magnitudes; of equal ones, those with the lowest indices."""


class Factors(Protocol):
    """One of the two factors of each gradient matrix, of few columns.

    What has no factors travels with the left ones.
    """


class Part(Protocol):
    """What a member has sent of its accumulated gradient, or the sum: entries, or a product."""


class GradientSum(Protocol):
    """A group on its way to a sum of parts of all gradients, as a `SumRule` has it.

    What members send each other here breaks the group if it is not what was to come.
    """

    size: int
    """Of the accumulated gradient: samples * gradient + residual."""
    rank: int
    """Ours among the members."""
    members: tuple[PeerId, ...]

    async def all_gather(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """As many numbers of each member, in the order of ranks: each from 0 to 2^32 - 1."""

    # entries

    async def largest(self, count: int) -> Entries:
        """Of the accumulated gradient, the numbers of the largest magnitudes, none of them 0."""

    async def above(self, threshold: float) -> Entries:
        """Of the accumulated gradient, the numbers of at least this magnitude, above 0."""

    async def send(
        self, parts: Sequence[Entries], due: Sequence[int] | None = None
    ) -> Sequence[Entries]:
        """Send to each rank its part; returns what each has sent to us, our own part included.

        With `due`, from each rank so many entries come, and empty parts are not sent.
        """

    async def add(self, parts: Sequence[Entries]) -> Entries:
        """Their sum, index by index, added up in this order."""

    def join(self, parts: Sequence[Entries]) -> Entries:
        """One after the other: their indices do not overlap."""

    # factors of matrices

    def random_factors(self, columns: int) -> Factors:
        """Right factors of so many columns to begin with."""

    async def times(self, right: Factors) -> Factors:
        """Left factors: each matrix of the accumulated gradient times its right one."""

    async def transposed_times(self, left: Factors) -> Factors:
        """Right factors: each of these matrices, transposed, times its left one."""

    async def basis(self, left: Factors) -> Factors:
        """The sum of these over all members, then made orthonormal; the same bits at all."""

    async def all_reduce(self, right: Factors) -> Factors:
        """The sum of these over all members; the same bits at all."""

    def product(self, left: Factors, right: Factors) -> Part:
        """Matrices: a left one, as `basis` gave it, times a right one, transposed."""


SumRule = Callable[[GradientSum], Awaitable[tuple[Part, Part]]]
"""What a group does instead of adding up all numbers of all gradients.

Returns what this member has sent of its own, and the sum, which all members get alike. What it has
sent and the sum has is delivered, once the sum is taken in; the rest stays in its residual.
"""


class Group(Protocol):
    """One attempt of a formed group, as `Algorithm.average` has it in its hands.

    If it breaks, `reduce` and `keep` do not return, and `average` begins again with those that are
    left, if any are: let whatever is raised here pass.
    """

    members: tuple[PeerId, ...]
    """Sorted, ourselves included."""
    version: int | None
    """Of the schedule; None for a group that was claimed, or of a barrier."""
    awaited: bool
    """Our trainer has arrived at its version, and stands still until it is over."""

    @property
    def what(self) -> What:
        """Which vectors it averages."""

    async def reduce(self, rule: SumRule | None = None) -> None:
        """Average what all members contribute; nothing here is changed by it.

        Of gradients for which the trainer waits, add up what `rule` says, if there is one.
        """

    async def commit(self) -> None:
        """Take the result in: of models, add mean - snapshot; of gradients, replace them.

        Every member must do this, or keep it, for the group to be done: nothing may be awaited
        between `reduce` and this that others have to bring about.
        """

    async def reduce_scatter(self) -> None:
        """The first half of `reduce`: of gradients, our shard of the sum is here."""

    def release_trainer(self) -> None:
        """All agree that the version stands: our trainer goes on, into its next forward pass.

        There each part of the update is made as soon as its means are here, and no later than the
        forward pass needs it. `all_gather` and `commit` must follow. Alone in a group, nothing.
        """

    async def all_gather(self) -> None:
        """The second half of `reduce`: the result is here.

        If the group breaks and the trainer is released, what has come counts. A member that lacks
        some of it takes over the model of another one at the next barrier.
        """

    async def keep(self) -> Mean:
        """Reduce models, and take the mean away instead of taking it in."""


class Algorithm:
    """Base of all algorithms; see the module's docstring."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """An algorithm without options."""

    averages: str = "models"
    """``models`` or ``gradients``: what its groups average. Gradients of peers that are not
    `in_step` are delivered late: those of each step with the next version that runs."""

    compresses: bool = False
    """Its means leave something out, for later ones: what travels depends on the numbers."""

    pushes_shares: bool = False
    """It uses `Swarm.push`: peers take shares of each other's models in."""

    state_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that outlive a step: numbers, texts, and lists and dicts of such."""

    def __init__(self, config: Any = None) -> None:  # Any: each algorithm has a Config of its own
        self.config: Any = config if config is not None else self.Config()

    # --- what it declares: class attributes, or properties where an option decides ----------------

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer may wait for others: as an option `waits` says, if there is one."""
        return bool(getattr(self.config, "waits", False))

    @property
    def in_step(self) -> bool:
        """Whether all peers take the same steps together and have equal models after each."""
        return False

    @property
    def overlaps(self) -> str:
        """What gradients of peers `in_step` travel behind: ``none``, ``backward`` or ``both``.

        ``backward``: a step's own, which still makes them; ``both``: their means come behind the
        next forward pass.
        """
        return "none"

    @property
    def bucket_mib(self) -> float:
        """Where it `overlaps`, MiB of gradients that travel together; 0: tuned while training."""
        return float(getattr(self.config, "bucket_mib", 0))

    @property
    def outer(self) -> OuterRule | None:
        """The optimizer that each mean of models, or of pseudo-gradients, goes through."""
        return None

    @property
    def conserves_mean(self) -> bool:
        """Whether its averages leave the mean of all models where training made it."""
        return True

    @property
    def now(self) -> str:
        """Of one that works as another: as which, in the words of `p2ptrain set`. Or else empty."""
        return ""

    # --- when it acts -----------------------------------------------------------------------------

    async def after_backward(self, swarm: Swarm) -> None:
        """Gradients are ready."""

    async def after_update(self, swarm: Swarm) -> None:
        """The optimizer has run."""

    async def background(self, swarm: Swarm) -> None:
        """Beside the trainer; cancelled when the peer leaves.

        If not its own: `after_update` where no trainer waits, once for all updates meanwhile.
        """
        updates = 0
        while not self.trainer_waits:
            updates = await swarm.wait_for_update(updates + 1)
            await self.after_update(swarm)

    async def average(self, group: Group) -> None:
        """What every member does in a group that is formed, wherever its own trainer is."""
        await group.reduce()
        await group.commit()

    def take_in(self, versions: Sequence[int]) -> Sequence[int]:
        """Of versions whose means of gradients wait for the trainer, those that it takes in.

        Asked at its boundary and on its side, the oldest first: look at these alone. Each has an
        optimizer step of its own; the others are forgotten.
        """
        return versions

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        """Take what the algorithm on `source` told us.

        Raises:
            RemoteProtocolError: for what it would never say; that is counted and changes nothing.
        """
        raise RemoteProtocolError(f"{source} says {message.kind!r}, of which we know nothing")

    def handle_push(self, swarm: Swarm, source: PeerId, clock: int) -> None:
        """A share that `source` pushed with this `clock` has been taken in. Raises as above."""

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        """The group that `me` is in at `version` (1, 2, ...) if `peers` train, and its rule.

        Pure: all peers find the same groups, which do not overlap.
        """
        raise NotImplementedError

    # --- what it is asked -------------------------------------------------------------------------

    def servers(self, peers: Sequence[PeerId]) -> Sequence[PeerId]:
        """If parts of the model have servers: which of these peers, sorted, has each part.

        Then those alone reduce what all average, and `exchange_updates` may be used. Pure.
        """
        return ()

    @property
    def needs_all(self) -> bool:
        """Each peer has to know everyone: for groups of all, or graphs by rank."""
        return True

    def check_swarm(self, peers: int) -> None:
        """Raise ConfigError if the options make no sense in a swarm of so many peers."""

    def state_dict(self) -> dict[str, Any]:  # Any: plain values, as JSON has them
        """Everything of its own that a continued run needs: `state_names`."""
        return {name: getattr(self, name) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Go on where `state_dict` was taken. Raises StateError if that was another algorithm."""
        if sorted(state) != sorted(self.state_names):
            raise StateError(
                f"a state with {', '.join(sorted(state)) or 'nothing'} where "
                f"{type(self).__name__} has {', '.join(sorted(self.state_names)) or 'nothing'}; "
                "load it into the algorithm that it was saved by"
            )
        for name, value in state.items():
            setattr(self, name, value)

    def acts(self, moment: str) -> bool:
        """True if this algorithm defines `moment`, or `schedule`."""
        return getattr(type(self), moment) is not getattr(Algorithm, moment)


class CompressedGradients(Algorithm):
    """Base of those that average a part of the gradients of peers in step: `sum` says which.

    What is left out stays in each peer's residual, for later means. Momentum, Adam and clipping
    come after the mean.
    """

    averages = "gradients"
    trainer_waits = True
    in_step = True
    compresses = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """When a gradient travels whole."""

        dense_versions: int = 0
        """The first so many versions are averaged whole, as `allreduce` does: a young model changes
        everywhere at once (Ok-Topk's VGG: 512)."""

        def __post_init__(self) -> None:
            if self.dense_versions < 0:
                raise ConfigError(f"dense_versions = {self.dense_versions} must be 0 or more")

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()

    async def average(self, group: Group) -> None:
        is_whole = (group.version or 0) < self.config.dense_versions
        await group.reduce(None if is_whole else self.sum)
        await group.commit()

    async def sum(self, group: GradientSum) -> tuple[Part, Part]:
        """What this peer has sent of its gradients, and what the sum of all is."""
        raise NotImplementedError


def in_turn(peers: Sequence[PeerId], met: Mapping[PeerId, int], rng: Random) -> list[PeerId]:
    """Some of `peers`: those never met, then those met longest ago; else in random order."""
    some = rng.sample(peers, min(len(peers), MOST_ASKED))
    return sorted(some, key=lambda peer: met.get(peer, -1))


async def meet_someone(
    swarm: Swarm, candidates: Callable[[], Sequence[PeerId]], *, fragment_s: Seconds = 0
) -> bool:
    """Average in a pair, with the first of `candidates` that is free, of those met longest ago.

    The half of them that was met longest ago is asked first, and all only if none of those will do:
    members of the last group are the first to be free for each other again, and pairs that meet
    only each other part from the swarm. If an older claim of another peer takes us meanwhile, its
    exchange runs first, ours follows. `candidates` is asked anew before each attempt. Returns
    whether there was an average.
    """
    for part in (2, 1):  # half of them; if none of those will do, all
        outcome = Outcome.YIELDED
        while outcome is Outcome.YIELDED:
            if not (others := candidates()):
                return False
            order = in_turn(others, swarm.met(), swarm.rng)
            some = order[: -(-len(order) // part)]
            outcome = (await swarm.form(some, 1, fragment_s=fragment_s)).outcome
        if outcome in (Outcome.DONE, Outcome.WITHDRAWN):
            break
    return outcome is Outcome.DONE


def check_fragment(algorithm: str, fragment_s: Seconds) -> None:
    """Refuse a duration of an average that is none."""
    if not 0 <= fragment_s < math.inf:
        raise ConfigError(f"{algorithm} fragment_s = {fragment_s} must be 0 or more")


def check_bucket(bucket_mib: float) -> None:
    """Refuse a size of buckets that is none."""
    if not 0 <= bucket_mib <= MOST_BUCKET_MIB:
        raise ConfigError(f"bucket_mib = {bucket_mib} must be from 0 to {MOST_BUCKET_MIB}")


def known_algorithms() -> tuple[str, ...]:
    """The names of the algorithms that come with p2ptrain, sorted."""
    return modules_of(PACKAGE, but=("base",))


def load_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Build the algorithm `name` (or ``package.module:Class``) with `options`.

    Raises:
        ConfigError: if there is no such algorithm or option, an option's value does not fit, or it
            declares what cannot be.
    """
    kind, options = _find(name), options or {}
    check_options(f"algorithm {name!r}", kind.Config, options)
    algorithm = kind(kind.Config(**options))
    if algorithm.averages not in ("models", "gradients"):
        mistake = f"averages = {algorithm.averages!r}; write 'models' or 'gradients'"
        raise ConfigError(f"algorithm {name!r} declares {mistake}")
    for what, is_so in {
        "in_step = True": algorithm.in_step,
        "averages = 'gradients'": algorithm.averages == "gradients",
        "after_backward": algorithm.acts("after_backward"),
    }.items():
        if is_so and not algorithm.trainer_waits:
            mistake = f"{what}, for which trainers wait, and trainer_waits = False; write True"
            raise ConfigError(f"algorithm {name!r} declares {mistake}")
    if algorithm.overlaps != "none" and (algorithm.compresses or not algorithm.in_step):
        mistake = f"overlaps = {algorithm.overlaps!r}, for whole gradients of peers in_step"
        raise ConfigError(f"algorithm {name!r} declares {mistake}; declare those, too")
    if algorithm.compresses and not (algorithm.in_step and algorithm.averages == "gradients"):
        mistake = "compresses = True, which is for gradients of peers that are in_step"
        raise ConfigError(f"algorithm {name!r} declares {mistake}; declare those, too")
    return algorithm


def _find(name: str) -> type[Algorithm]:
    module, class_name = module_of("algorithm", name, PACKAGE, known_algorithms())
    found = [
        value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Algorithm)
        and value.__module__ == module.__name__
        and (":" not in name or class_name in ("", key))
    ]
    if len(found) != 1:
        raise ConfigError(f"algorithm {name!r}: {module.__name__} has {len(found)} such classes")
    return found[0]
