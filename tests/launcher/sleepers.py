"""A benchmark of two processes that never end by themselves; they print who they are.

What runs in them is here, and not in the tests: those import torch, which takes seconds.
"""

import os
import time

from p2plab.harness.processes import side_by_side
from p2ptrain.errors import ConfigError


def sleep(seconds: float) -> None:
    os.write(1, f"{os.getpid()}\n".encode())  # a line at once: two write to one pipe
    time.sleep(seconds)


def refuse(number: int) -> None:
    raise ConfigError("three is too much")


def main() -> None:
    side_by_side(sleep, [1e6, 1e6], lambda _: None, at_once=2)


if __name__ == "__main__":
    from p2plab.harness.bench import run_bench  # not in the two processes: it takes seconds

    run_bench(main)
