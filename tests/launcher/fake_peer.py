"""A process that behaves like a peer, without training. Standard library only: it starts fast."""

import json
import signal
import sys
import time
import tomllib
from pathlib import Path

MODEL_SIZE = 17_226  # of the task digits, so that its rows can be evaluated


def main() -> None:
    config = tomllib.loads(Path(sys.argv[-1]).read_text())
    behaviour = config["algorithm_options"].get("behaviour", "train")
    if behaviour == "refuse":
        print("some chatter", file=sys.stderr)
        print("error: port 1 is in use", file=sys.stderr)
        sys.exit(2)
    if behaviour == "crash":
        raise RuntimeError("boom")
    if behaviour == "sleep":
        time.sleep(60)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(config["out"], f"{config['name']}.is-deaf").touch()
        time.sleep(60)
    if behaviour == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        Path(config["out"], f"{config['name']}.listens").touch()
        time.sleep(60)
    if behaviour == "train":
        train(Path(config["out"]), config["name"], config["algorithm"])


def train(folder: Path, name: str, algorithm: str) -> None:
    """Ten steps, which took no time at all but say that they did."""
    step_s = 0.1 if algorithm == "ad_psgd" else 0.4
    with (
        (folder / f"{name}.jsonl").open("w") as file,
        (folder / f"{name}.snapshots").open("wb") as rows,
    ):

        def write(kind: str, at: float, **fields: object) -> None:
            file.write(json.dumps({"kind": kind, "t": at, **fields}) + "\n")

        write("started", 0.0, unix_s=1e9, model_size=MODEL_SIZE)
        write("ready", 0.0, members=[])
        for row in range(2):
            rows.write(bytes(4 * MODEL_SIZE))
            rows.flush()
            write("snapshot", row * 10 * step_s, row=row, step=row * 10, tick=row, frees=None)
        for step in range(10):
            fields = {"samples": 32, "loss": 1.0, "compute_s": step_s, "wait_s": 0.0}
            write("step", (step + 1) * step_s, step=step, **fields)
        totals = dict.fromkeys(("compute_s", "wait_s", "comm_s", "sent_bytes", "received_bytes"), 0)
        counts = {"steps": 10, "samples": 320, "groups_formed": 0, "groups_failed": {}}
        ages = {"staleness_p50": None, "staleness_p99": None}
        write("ended", 10 * step_s, **totals, **counts, **ages, why="all samples are trained")


main()
