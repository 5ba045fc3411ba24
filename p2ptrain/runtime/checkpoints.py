"""Write one peer's checkpoints beside its trainer, and go on from them.

**The cut.** A checkpoint is of one boundary of this peer's trainer. Its trainer stands still until
everything small is noted and the model is held; then it computes on, and only its next update waits
until the model is in the file. Digests and the way to the disk take no part of its time. What a
group has put into the model, or into pending, is in; what is under way is out, except for gradients
of stale averages: those wait again (`runtime/pending_gradients.py`).

**Versions.** Peers that average gradients agree on the versions of their checkpoints. Each votes
beside its vectors (`Contribution.wants_checkpoint`) once one is due by its clock. All members of
that average write one when it is in their models, unless one of them still writes its last one:
then the first version after that. So a slow disk costs checkpoints and no time, and a disk that
hangs is not waited for longer than `HANGS` intervals. Under models each writes by its clock.

**Starting again.** While peers arrive each states which versions it has (`Member.resumes`). If
none has trained when all are here, the *swarm* starts again: peers in step from the newest version
that all have, peers of stale gradients all from the newest model, others each from its own. A peer
that comes back while others train takes their model, as every newcomer does, and of its checkpoint
only what is its own: the generators, the position in its data, what its program has registered.

**Samples** of peers that do not come back are not lost: the first by name of those that go on from
their own checkpoints counts them as its own. Its checkpoints leave them out: whoever starts again
next time counts anew who is missing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from p2ptrain.compute.replica import StateOwner
from p2ptrain.compute.tensor_file import Data
from p2ptrain.core.messages import MOST_BEFORE
from p2ptrain.errors import StateError, reason_of
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.checkpoint_folder import Checkpoint, CheckpointFolder, Document
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.state_owners import load, packed, state_of, unpacked

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

RESERVED = ("algorithm", "choices", "residual", "gradients", "judge", "outer", "generators")
"""Names of the peer's own parts."""

FURTHEST = 2**32 - 1
"""A checkpoint that is further than that states so much."""

HANGS = 3
"""A checkpoint that takes longer than so many intervals keeps others from theirs no more."""


class Checkpoints:
    """One peer's; there is one only where the peer has a folder for them."""

    def __init__(self, host: "Driver", own: Mapping[str, StateOwner]) -> None:
        config, environment = host.config, host.environment
        self._host = host
        self._own = own
        self._folder = CheckpointFolder(
            Path(config.checkpoint) / host.name, config.checkpoint_keep, environment.files
        )
        self._every_s = config.checkpoint_every_s
        self._last_at: Seconds = host.now
        self._last_updates = -1
        self._writing: asyncio.Task[None] | None = None
        self._is_failing = False
        self._notes: list[str] = []
        self._go_on: list[PeerId] = []
        """Those that go on from checkpoints of their own when the swarm starts again."""
        self.found: Checkpoint | None = None
        """What a resumed peer goes on from."""

    @property
    def _disk(self) -> CopyExecutor:
        """What may take long runs there."""
        return self._host.environment.disk or self._host.environment.executor

    # --- writing ----------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether one is to be written at this boundary. Trainer's side."""
        if self._is_busy():
            return False
        if self._host.algorithm.averages == "gradients":
            return self._host.agreed.agreed_to_write and self.is_behind()
        return self._host.now - self._last_at >= self._every_s

    def wants_one(self) -> bool:
        """Our vote: one is due by our clock, and we can write it."""
        return self._host.now - self._last_at >= self._every_s and not self._is_busy()

    def is_writing(self) -> bool:
        """Whether the others wait with the next one until our last one is on the disk."""
        return self._is_busy() and self._host.now - self._last_at < HANGS * self._every_s

    def _is_busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def is_behind(self) -> bool:
        """Whether the model has had updates since the last one."""
        return self._host.replica.updates != self._last_updates

    def of_trainer(self) -> dict[str, Any]:  # Any: what owners give
        """The states of what the trainer's thread changes."""
        return state_of({**self._host.replica.owners, **self._own})

    async def cut(self, states: Mapping[str, Any]) -> None:  # Any: as above
        """Note everything and begin to write; returns when the model is held, or none is written.

        The trainer stands still meanwhile.
        """
        host, vectors, held = self._host, dict[str, Any](), asyncio.Event()
        if self._writing and self._is_busy():
            await self._writing
        self._last_at, self._last_updates = host.now, host.replica.updates
        try:
            state = packed({**states, **state_of(self._parts())}, vectors, "state")
        except StateError as error:
            self._say(f"writes no checkpoint: {error}")
            return
        document = {
            "peer": host.name,
            "algorithm": host.config.algorithm,
            "works_with": host.live.choice.text,
            "fingerprint": host.replica.fingerprint,
            "unix_s": host.environment.unix_clock(),
            "updates": host.replica.updates,
            "version": self._version(),
            "samples": host.me.samples - host.agreed.samples_of_lost,
            "progress": host.agreed.progress,
            "state": state,
        }
        self._writing = host.start(self._write(document, vectors, held))
        await held.wait()

    def _parts(self) -> dict[str, StateOwner]:
        averages = self._host.averages
        parts: dict[str, StateOwner] = {
            "algorithm": self._host.algorithm,
            "choices": _Choices(self._host.rng),
            "residual": averages.residual,
            "gradients": averages.pending,
        }
        return {**parts, "judge": averages.judge} if averages.judge else parts

    def _parts_of_model(self) -> dict[str, StateOwner]:
        """Those that the worker thread changes together with the model."""
        outer = self._host.averages.outer
        return {"outer": outer} if outer else {}

    def _version(self) -> int:
        """How far the schedule of the swarm is, in this model."""
        host = self._host
        stale = host.algorithm.averages == "gradients" and not host.algorithm.in_step
        return host.replica.version if stale else host.machine.groups.wait_avoiding.version

    async def _write(self, document: Any, vectors: dict[str, Any], held: asyncio.Event) -> None:
        host = self._host
        post = host.environment.post

        def model(write: Callable[[Data], None]) -> None:
            # In one piece on that thread: no outer step is in the model and not in its anchor.
            parts = state_of(self._parts_of_model())
            document["state_of_model"] = packed(parts, vectors, "state_of_model")
            host.replica.write_state(write, is_held=lambda: post(held.set))

        try:
            partial_folder = await host.averages.whole(partial(self._folder.begin, model))
            finish = partial(self._folder.finish, partial_folder, document, vectors)
            size_bytes = await self._disk(finish)
        except (OSError, StateError) as error:
            self._say(f"cannot write a checkpoint to {self._folder.folder} ({reason_of(error)})")
        else:
            self._is_failing = False
            lasted_s = host.now - self._last_at
            host.metrics.record(
                "checkpoint",
                updates=document["updates"],
                size_bytes=size_bytes,
                lasted_s=lasted_s,
            )
        finally:
            held.set()

    def _say(self, what: str) -> None:
        if not self._is_failing:
            text = f"{what}; training goes on, and tries again"
            self._host.metrics.record("warning", text=text)
        self._is_failing = True

    async def settle(self) -> None:
        """Wait for the one that is being written; it was the last one."""
        if self._writing:
            await asyncio.gather(self._writing, return_exceptions=True)
            with suppress(OSError):
                await self._disk(self._folder.tidy)

    # --- going on ---------------------------------------------------------------------------------

    def find(self) -> tuple[int, ...]:
        """Look for the newest one that is whole; returns what this peer states of all it has.

        Of those before it only the document is read now; the one that is used is read whole.

        Raises:
            StateError: if it is of another model or algorithm.
        """
        self.found = next(self._folder.whole(self._notes.append), None)
        if self.found is None:
            self._notes.append(f"found no checkpoint in {self._folder.folder}; begins without one")
            return ()
        self._check(self.found)
        before = self._folder.documents(before=self.found.number)
        reach = {self._reach(d): None for d in (self.found.document, *before)}
        return tuple(reach)[: 1 + MOST_BEFORE]

    def tell(self) -> None:
        """Record what was found, now that there are records."""
        for text in self._notes:
            self._warn(text)
        self._notes.clear()

    def has_any(self) -> bool:
        """Whether there is one, whole or not."""
        return bool(self._folder.numbers())

    def _warn(self, text: str) -> None:
        self._host.metrics.record("warning", text=text)

    def _check(self, checkpoint: Checkpoint) -> None:
        host, where = self._host, f"{self._folder.folder}/{checkpoint.number:08}"
        for what, here in (
            ("algorithm", host.config.algorithm),
            ("fingerprint", host.replica.fingerprint),
        ):
            if (there := checkpoint.document.get(what)) != here:
                raise StateError(
                    f"checkpoint {where} is of {what} {there!r}, and this peer's is {here!r}; "
                    "resume with what it was written by, or begin in another folder"
                )

    def _reach(self, document: Document) -> int:
        algorithm = self._host.algorithm
        scheduled = not algorithm.in_step and algorithm.acts("schedule")
        return max(1, min(FURTHEST, int(document["version" if scheduled else "updates"])))

    async def start_again(self) -> bool:
        """All are here, and none has trained: load what the swarm goes on from.

        Returns false if that is the model of another peer. Raises StateError if ours does not fit.
        """
        host = self._host
        algorithm, membership = host.algorithm, host.machine.membership
        members = (membership.me, *membership.others)
        held = {m.peer: (m.resumes, *m.resumes_before) for m in members if m.resumes}
        checkpoint = self.found
        if checkpoint is None or host.name not in held:
            return False
        newest = max(reach for stated in held.values() for reach in stated)
        goes_on = dict.fromkeys(held, True)
        if algorithm.in_step:
            common = in_common([*held.values()])
            goes_on = {peer: common in stated for peer, stated in held.items()}
            checkpoint = self._of_version(common)
        elif algorithm.averages == "gradients":
            goes_on = {peer: stated[0] == newest for peer, stated in held.items()}
        self._go_on = [peer for peer, own in goes_on.items() if own]
        if checkpoint is None or host.name not in self._go_on:
            return False
        await host.environment.executor(partial(self._load, checkpoint))
        if algorithm.acts("schedule") and algorithm.averages == "gradients":
            host.replica.version = newest
        return True

    def _of_version(self, reach: int) -> Checkpoint | None:
        """Ours that is so far, if it is whole: then the model of another one is as good."""
        if self.found and self._reach(self.found.document) == reach:
            return self.found
        whole = self._folder.whole(self._warn)
        return next((one for one in whole if self._reach(one.document) == reach), None)

    def _load(self, checkpoint: Checkpoint) -> None:
        host = self._host
        try:
            host.replica.import_state(checkpoint.model)
        except StateError as error:
            why = host.replica.import_state(checkpoint.model, whole=False)
            self._warn(f"went on without the optimizer's state: {why or error}")
        parts = {**self._parts(), **self._parts_of_model()}
        states = self._states(checkpoint)
        same = checkpoint.document.get("works_with") == host.live.choice.text
        load(parts, states, tuple(parts) if same else ("choices",))  # the rest is of other settings
        self.found = checkpoint
        self._last_updates = checkpoint.updates
        host.agreed.samples_before = int(checkpoint.document["samples"])
        host.agreed.progress = int(checkpoint.document["progress"])
        host.agreed.restored_progress = host.agreed.progress
        self._folder.forget_after(checkpoint.number)

    def take_over_those_who_are_lost(self) -> None:
        """Count on the samples of those that do not go on from theirs, if we are the first."""
        membership, agreed = self._host.machine.membership, self._host.agreed
        here = [member for peer in self._go_on if (member := membership.member(peer))]
        lost = agreed.restored_progress - sum(member.samples for member in here)
        if lost > 0 and self._host.name == min(self._go_on):
            self._host.count_lost(lost)

    def load_own(self, *names: str) -> None:
        """Load what the trainer's thread changes, or these of it. On that thread."""
        if self.found:
            owners = {**self._host.replica.owners, **self._own}
            load(owners, self._states(self.found), names or tuple(owners))

    def _states(self, checkpoint: Checkpoint) -> Mapping[str, Any]:  # Any: as above
        document, vectors = checkpoint.document, checkpoint.vectors
        names = ("state", "state_of_model")
        found = (unpacked(document[name], vectors) for name in names if name in document)
        return {name: state for states in found for name, state in states.items()}


def in_common(held: Sequence[Sequence[int]]) -> int:
    """The newest version that all have; if there is none, the newest of those that most have.

    Args:
        held: of each peer the versions that it has; at least one version in all.
    """
    counts = Counter(reach for stated in held for reach in {*stated})
    return max(counts, key=lambda reach: (counts[reach], reach))


class _Choices:
    """The random numbers that decide with which peers to average."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def state_dict(self) -> dict[str, Any]:  # Any: Python's own
        return {"state": self._rng.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        self._rng.setstate(state["state"])
