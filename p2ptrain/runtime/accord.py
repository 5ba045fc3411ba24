"""What a synchronous swarm agrees upon inside its averages of gradients.

Two numbers ride along whose mean all members see alike: who wants to end, so that all end after the
same version, and progress, so that all follow the same schedule.
"""

from dataclasses import dataclass

from p2ptrain.compute.replica import Vector

RIDING = 2
"""Numbers that ride along."""


@dataclass(slots=True)
class Accord:
    """One peer's word in it, and the outcome."""

    contributes: bool = True
    """False: our gradients have no say in the next average."""
    averaged_anything: bool = True
    """False: nobody's gradients had."""
    samples_of_step: int = 0
    """Of the step whose gradients are to be averaged."""
    wants_to_end: bool = False
    """Our vote."""
    agreed_to_end: bool = False
    progress: int = 0
    """Samples of the whole swarm, as far as we know, or as all agreed."""

    def take_in(self, riding: Vector) -> None:
        """The means of the two numbers."""
        self.agreed_to_end = bool(riding[0] > 0)
        self.progress = round(float(riding[1]))
