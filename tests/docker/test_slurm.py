"""The Slurm script, with `srun`, `squeue` and `scontrol` that stand for a cluster on this machine.

Its nodes are addresses of the loopback network.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "slurm" / "peers.sbatch"

SRUN = """
echo "$@" > srun-arguments
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $(jobs -p)' TERM
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) \\
        SLURMD_NODENAME=127.0.0.$((rank / SLURM_NTASKS_PER_NODE + 2)) "$@" > "task$rank.log" 2>&1 &
done
code=0
for task in $(jobs -p); do
    wait "$task" || code=$?
    while kill -0 "$task" 2> /dev/null; do wait "$task" || code=$?; done
done
exit $code
"""
STUBS = {
    "srun": SRUN,
    "squeue": 'cat running-jobs; echo "$@" >> squeue-arguments',
    "scontrol": """
if [[ $1 == requeue ]]; then echo "$2" > requeued; exit; fi
tr ',' '\\n' <<< "$3"
""",
}


@pytest.fixture
def cluster(tmp_path):
    """A folder whose programs are the cluster's, and an environment to run a job in."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "p2ptrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m p2ptrain "$@"\n')
    (tmp_path / "p2ptrain").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "USER": "someone",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NAME": "p2ptrain",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "3",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    (tmp_path / "running-jobs").write_text("4711 127.0.0.2,127.0.0.3\n")
    return tmp_path, environment


def submitted(cluster, *arguments: str) -> subprocess.Popen[str]:
    folder, environment = cluster
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_bash_finds_no_mistake_in_the_script():
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_job_is_queued_again_when_it_is_preempted():
    directives = re.findall(r"^#SBATCH (.*)$", SCRIPT.read_text(), re.MULTILINE)
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@60"} <= set(directives)


@pytest.mark.sockets
@pytest.mark.slow
def test_the_tasks_of_a_job_find_each_other_and_train_together(cluster):
    folder, _ = cluster
    job = submitted(cluster, "--samples", "60000", "--out", "results")
    said = job.communicate(timeout=100)[0]
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("task*.log")))
    assert job.returncode == 0, said + logs
    assert "--no-kill --kill-on-bad-exit=0" in (folder / "srun-arguments").read_text()
    names = [f"job4711-{rank}" for rank in range(3)]
    for name in names:
        assert (folder / "results" / f"{name}.safetensors").exists(), logs
        members = [
            set(record["members"])
            for line in (folder / "results" / f"{name}.jsonl").read_text().splitlines()
            if (record := json.loads(line))["kind"] == "group" and record["outcome"] == "done"
        ]
        assert members, "it took part in averages"
    ports = sorted(re.findall(r"listens at (\S+)", logs))
    assert ports == ["127.0.0.2:24220", "127.0.0.2:24221", "127.0.0.3:24220"], logs


def test_before_the_time_is_up_peers_leave_and_the_job_is_queued_again(cluster):
    folder, _ = cluster
    program = "trap 'touch left-$$; exit 0' TERM\ntouch runs-$$\nwhile :; do sleep 0.05; done\n"
    program = f"[ $1 = peer ] || exit 0\n{program}"  # `p2ptrain keys` is asked first
    (folder / "p2ptrain").write_text(f"#!/bin/sh\n{program}")
    job = submitted(cluster)
    for _ in range(3000):
        if len(list(folder.glob("runs-*"))) == 3:
            break
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=30)[0]
    assert "the job is queued again" in said
    assert (folder / "requeued").read_text() == "4711\n"
    assert len(list(folder.glob("left-*"))) == 3


def test_all_jobs_of_a_name_are_one_swarm(cluster):
    folder, environment = cluster
    (folder / "p2ptrain").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "running-jobs").write_text("4711 127.0.0.2,127.0.0.3\n5002 127.0.0.4\n")
    environment["SLURM_NTASKS_PER_NODE"] = environment["SLURM_NTASKS"] = "1"
    job = submitted(cluster, "--task", "digits")
    said = job.communicate(timeout=30)[0]
    assert job.returncode == 0, said
    assert (folder / "task0.log").read_text().split() == [
        "peer",
        "--discover",
        "127.0.0.2:24220,127.0.0.3:24220,127.0.0.4:10040",
        *("--listen", "127.0.0.2:24220", "--name", "job4711-0", "--task", "digits"),
    ]
    asked = (folder / "squeue-arguments").read_text()
    assert "--user=someone --name=p2ptrain" in asked
