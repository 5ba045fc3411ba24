"""The loop of a peer that only serves."""

from p2ptrain.compute.steps import serve_others


class Swarm:
    """A peer in a swarm, and its work: others come after two sleeps, and end after four steps."""

    def __init__(self, *, in_step: bool) -> None:
        self.in_step = in_step
        self.progress = self.slept = 0
        self.steps: list[tuple[int, float | None]] = []
        self.prepared: list[int] = []
        self.buckets = None

    @property
    def others_train(self) -> bool:
        return self.slept >= 2

    @property
    def should_stop(self) -> bool:
        return len(self.steps) >= 4

    def batch_size(self, usual: int) -> int:
        raise AssertionError

    async def before_forward(self, bucket: int) -> None:
        raise AssertionError

    async def step(self, samples: int, loss: float | None) -> None:
        self.steps.append((samples, loss))
        self.progress += 96

    def prepare(self, progress: int) -> None:
        self.prepared.append(progress)

    async def sleep(self, duration_s: float) -> None:
        self.slept += 1


async def test_in_step_it_makes_all_steps_without_samples_and_follows_the_schedule():
    swarm = Swarm(in_step=True)
    await serve_others(swarm, swarm, sleep=swarm.sleep)  # type: ignore[arg-type]
    assert swarm.steps == [(0, None)] * 4
    assert swarm.prepared == [0, 96, 192, 288]
    assert swarm.slept == 2, "where no one trains it does not spin"


async def test_where_peers_are_not_in_step_it_leaves_its_loop_when_the_first_is_here():
    swarm = Swarm(in_step=False)
    await serve_others(swarm, swarm, sleep=swarm.sleep)  # type: ignore[arg-type]
    assert (swarm.steps, swarm.slept) == ([], 2)
