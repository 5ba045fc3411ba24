"""The loop of a peer that only serves."""

from p2ptrain.compute.steps import serve_others


class Peer:
    """It is to stop after four steps; each is one of three peers that train."""

    buckets = None

    def __init__(self) -> None:
        self.progress = 0
        self.steps: list[tuple[int, float | None]] = []
        self.prepared: list[int] = []

    @property
    def should_stop(self) -> bool:
        return len(self.steps) >= 4

    async def step(self, samples: int, loss: float | None) -> None:
        self.steps.append((samples, loss))
        self.progress += 96

    def prepare(self, progress: int) -> None:
        self.prepared.append(progress)


async def test_it_makes_all_steps_without_samples_and_follows_the_schedule():
    peer = Peer()
    await serve_others(peer, peer)  # type: ignore[arg-type]
    assert peer.steps == [(0, None)] * 4
    assert peer.prepared == [0, 96, 192, 288]
