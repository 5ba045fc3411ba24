"""The process's random generators: Python's, numpy's and torch's, which a program draws from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from p2ptrain.errors import StateError


class Generators:
    """An owner of their states. Trainer's thread."""

    def state_dict(self) -> dict[str, Any]:  # Any: each library's own
        """Of all of them, those of CUDA devices included where CUDA is in use."""
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if is_used else []
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Set them. Raises StateError for states that they refuse."""
        try:
            random.setstate(state["python"])
            np.random.set_state(state["numpy"])
            torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
            for device, numbers in enumerate(state["cuda"]):
                if device < torch.cuda.device_count():
                    torch.cuda.set_rng_state(torch.from_numpy(numbers.copy()), device)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise StateError(f"states of random generators that do not fit: {error}") from error
