"""What a slot, or a peer's groups, ask of the rest of a peer: here, it takes part in anything."""

from collections.abc import Sequence

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.purpose import Purpose
from p2ptrain.ids import PeerId


class AnyGroup:
    """Of `GroupEnvironment` what a slot needs; and all groups are welcome."""

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        return True

    def contribution(self, purpose: Purpose) -> Contribution:
        return MODEL

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        return ()

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        return 0


class FixedEnvironment(AnyGroup):
    """Implements `GroupEnvironment`: a fixed set of peers that average models."""

    has_model = True

    def __init__(self, peers: Sequence[PeerId]) -> None:
        self._peers = tuple(sorted(peers))

    def participants(self) -> Sequence[PeerId]:
        return self._peers

    def trainees(self) -> Sequence[PeerId]:
        return self._peers
