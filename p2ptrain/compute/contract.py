"""What peers have to agree on, and the sentence that names the first thing that differs.

Two descriptions of a peer, each of short texts by name:

* its *settings*, equal at all peers of a swarm: algorithm and options, how vectors travel, under
  averages of gradients the optimizer's kind. A newcomer whose settings differ is refused; a digest
  of them and of the model is in every message.
* its *update rule*: kind and hyperparameters of its optimizers, and its frozen parameters. Where
  all peers take the same steps it is equal at each version, or models drift apart and nothing says
  so: so a digest of it goes with each contribution, and members whose digest is not that of most
  stop before they make the update.

What comes from another peer is bounded and printable (`net/wire.py`). `docs/contract.md` is the
table of everything that is compared.
"""

import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from p2ptrain.core.contribution import Contribution
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.ids import PeerId

if TYPE_CHECKING:
    from p2ptrain.averaging.base import Algorithm
    from p2ptrain.compute.replica import Replica

Description = Mapping[str, str]

MOST_DESCRIBED = 64
"""Entries of an update rule that are shown; its digest is of all."""

MOST_TENSORS = 4096
"""Tensors of a model that a newcomer describes."""

SHOWN = 200
"""Characters of a value; a longer one is cut, and its digest stands for the rest."""

OF_EXCHANGES = ("codec", "gradient_codec", "chunk_kib")
"""Settings of `ExchangeConfig` that decide on what is sent; its others are a peer's own."""

OF_LATER_EXCHANGES = (
    "trimmed_share",
    "robust_mean",
    "norm_limit",
    "opposed_groups",
    "audited_owners",
)
"""The same, but unknown to some peers of protocol 1.0: compared where one is not as by default."""

OF_THE_PROGRAM = ("optimizer", "parameter groups")
"""The part of an update rule that no schedule changes."""

FROZEN = "frozen parameters"
NONE = "none"


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What a peer makes of gradients, at one moment."""

    description: Description
    digest: int
    """64 bits of all of it, never 0."""


@functools.lru_cache(maxsize=64)  # in a simulated world, one serves all
def update_rule(*items: tuple[str, object]) -> UpdateRule:
    """The rule that these names and values describe."""
    texts = [(name, described(value)) for name, value in items]
    digest = hashlib.blake2b(repr(texts).encode(), digest_size=8).digest()
    return UpdateRule(dict(texts[:MOST_DESCRIBED]), int.from_bytes(digest) or 1)


def digest_of(*parts: object) -> str:
    """16 hexadecimal digits that stand for all of these."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def described(value: object) -> str:
    """A value in a few characters, equal for equal values: 1 and 1.0 are.

    Numbers have nine digits, more than a float32 tells apart: what the last bit of a cosine is on
    another machine is no difference.
    """
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    return shortened(repr(value))


def shortened(text: str) -> str:
    """At most `SHOWN` characters, other ones for another text."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... {digest_of(text)}"


def difference(me: str, ours: Description, peer: str, theirs: Description) -> str:
    """The first name under which two descriptions have other values, with both; or nothing."""
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name, "not set"), theirs.get(name, "not set")
        if here != there:
            return f"{name} is {there} at {peer} and {here} at {me}"
    return ""


def outliers(stated: Mapping[PeerId, Contribution]) -> tuple[PeerId, ...]:
    """Members whose update rule is not that of most.

    Of two rules that equally many have, that of the peer which has trained most counts: so a
    newcomer cannot end a swarm of one. One that states no rule is let be. All members find the
    same.
    """
    rules: dict[int, list[int]] = {}
    for one in stated.values():
        if one.rule:
            rules.setdefault(one.rule, []).append(one.samples)
    if len(rules) <= 1:
        return ()
    usual = max(rules, key=lambda rule: (len(rules[rule]), max(rules[rule])))
    return tuple(peer for peer, one in stated.items() if one.rule not in (0, usual))


class Newcomer(Protocol):
    """What a peer says of itself when it asks to join: `net.wire.Hello`."""

    @property
    def protocol(self) -> tuple[int, int]: ...
    @property
    def model(self) -> str: ...
    @property
    def model_size(self) -> int: ...
    @property
    def settings(self) -> Description: ...
    @property
    def tensors(self) -> Sequence[str]: ...


class Contract:
    """One peer's side of it.

    Args:
        me: its name.
        config: its `PeerConfig`.
        algorithm: as that configures it.
        replica: its model and optimizers.
        protocol: version of the protocol that it speaks.
    """

    def __init__(
        self,
        me: PeerId,
        config: Any,  # Any: a type of a layer above
        algorithm: "Algorithm",
        replica: "Replica",
        protocol: tuple[int, int],
    ) -> None:
        self._me, self._replica, self._protocol = me, replica, protocol
        self._in_step = algorithm.in_step
        options = {
            f"{config.algorithm} option {field.name}": getattr(algorithm.config, field.name)
            for field in fields(algorithm.config)
        }
        exchange, usual = config.exchange, type(config.exchange)()
        others = {name: getattr(exchange, name) for name in OF_EXCHANGES} | {
            name: getattr(exchange, name)
            for name in OF_LATER_EXCHANGES
            if getattr(exchange, name) != getattr(usual, name)
        }
        whole = {"algorithm": config.algorithm, **options, **others}
        whole["average_momentum"] = config.average_momentum
        self.settings = {name: described(value) for name, value in whole.items()}
        """What all peers of a swarm have alike, beside the model."""
        if algorithm.averages == "gradients":
            rule = replica.update_rule.description
            self.settings |= {name: rule[name] for name in OF_THE_PROGRAM if name in rule}
        self.digest = digest_of(protocol[0], self.settings, replica.fingerprint)
        """Of that and of the model: the name of the swarm in every message."""
        self.stated: Mapping[PeerId, Contribution] = {}
        """What the members of the last average stated, until they are compared."""
        self._rule: UpdateRule | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The model, for who may have another one."""
        return tuple(self._replica.tensors[:MOST_TENSORS])

    @property
    def rule(self) -> Description:
        """How this peer makes updates, as it last stated."""
        return (self._rule or self._replica.update_rule).description

    def state_rule(self) -> int:
        """A digest of how it makes the next one; the trainer waits."""
        self._rule = self._replica.update_rule
        return self._rule.digest

    def objection(self, peer: PeerId, theirs: Newcomer) -> str:
        """Why `peer`, which describes itself so, may not join; or nothing."""
        me = self._me
        if theirs.protocol[0] != self._protocol[0]:
            versions = [".".join(map(str, each)) for each in (theirs.protocol, self._protocol)]
            return (
                f"{peer} speaks protocol version {versions[0]} and {me} {versions[1]}; "
                "install the same release of p2ptrain on both"
            )
        model, size = self._replica.fingerprint, self._replica.model_size
        why = difference(me, self.settings, peer, theirs.settings)
        is_of_model = not why or why.startswith(OF_THE_PROGRAM)  # an optimizer's groups follow it
        if is_of_model and (theirs.model, theirs.model_size) != (model, size):
            return (
                f"{peer} trains a model of {theirs.model_size:,} numbers ({theirs.model}) and {me} "
                f"one of {size:,} ({model}){self._first_tensor(theirs.tensors)}; use the same model"
            )
        return why and f"{why}; start both with the same"

    async def compare_rules(
        self, version: int, rule_of: Callable[[PeerId], Awaitable[Description]]
    ) -> str:
        """Before the update: the sentence about members that would make another one than most.

        Args:
            version: of the average that is done.
            rule_of: asks a peer for its `rule`; empty if it does not answer.

        Raises:
            ConfigError: with that sentence, if this peer is one of them.
        """
        stated, self.stated = self.stated, {}
        wrong = outliers(stated)
        if not wrong:
            return ""
        is_ours = self._me in wrong
        right = (peer for peer, one in stated.items() if one.rule and peer not in wrong)
        other = next(right) if is_ours else wrong[0]
        theirs = await rule_of(other)
        what = difference(self._me, self.rule, other, theirs) if theirs else ""
        many = len(wrong) > 1
        text = (
            f"{', '.join(wrong[:8])} {'make' if many else 'makes'} another update than most peers "
            f"at version {version}{what and ': '}{what}; give all the same optimizer, and let "
            "schedules follow peer.progress"
        )
        if is_ours:
            raise ConfigError(text)
        return text

    async def compare_frozen(
        self, other: PeerId, rule_of: Callable[[PeerId], Awaitable[Description]]
    ) -> None:
        """Peers in step compare their update rules; others compare frozen parameters, at a join.

        Raises:
            StateError: if those of `other` have other values, after what could be taken over was.
        """
        ours = self.rule[FROZEN]
        if self._in_step or other == self._me or ours == described(NONE):
            return
        theirs = (await rule_of(other)).get(FROZEN, ours)
        if theirs != ours:
            raise StateError(
                f"{FROZEN} have the digest {theirs} at {other} and {ours} at {self._me}, so that "
                "both train another model; load or seed them alike at all peers"
            )

    def _first_tensor(self, theirs: Sequence[str]) -> str:
        """The first that differs; nothing if all that are described agree, or none is."""
        for here, there in zip_longest(self.tensors, theirs) if theirs else ():
            if here != there:
                return f": {there or 'nothing more'} instead of {here or 'nothing more'}"
        return ""
