"""Shared by benchmarks: csdctl in a process of its own, emulated fleets, programs that print figures."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from csdctl.job.model import load_job
from tests.lab.network import entered, limit_bandwidth, run_ip

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
CLIENTS = REPOSITORY / "benchmarks" / "clients"
CSDCTL = Path(sys.prefix) / "bin" / "csdctl"
PEERS = "CSDCTL_BENCH_PEERS"
"""The variable that names the directory in which other programs are installed for comparisons."""


def csdctl(directory: Path, *arguments: str) -> list[Any]:
    """Return the documents that the command printed with --json; its messages go to the terminal."""
    done = subprocess.run(
        [str(CSDCTL), *arguments, "--json"], cwd=directory, stdout=subprocess.PIPE, text=True, check=True
    )
    return read_documents(done.stdout)


def read_documents(output: str) -> list[Any]:
    """Return what a command printed with --json: one document, or one per line."""
    try:
        return [json.loads(output)]
    except ValueError:
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@contextmanager
def emulated_fleet(
    directory: Path, num_nodes: int, cpu: float, host_threads: int | None = None
) -> Iterator[None]:
    """Keep an emulated fleet up; its nodes have `cpu` of a core."""
    csdctl(directory, "emulate", "up", "--nodes", str(num_nodes), "--cpu", str(cpu))
    try:
        if host_threads:
            fleet = yaml.safe_load((directory / "fleet.yaml").read_text())
            fleet["host"] = {**fleet.get("host", {}), "threads": host_threads}
            (directory / "fleet.yaml").write_text(yaml.safe_dump(fleet))
        yield
    finally:
        csdctl(directory, "emulate", "down")


@contextmanager
def limited_link(mbit_s: int) -> Iterator[None]:
    """Run what this thread starts in a network of its own, if a rate is given."""
    if not mbit_s:
        yield
        return
    name = f"csdctl-bench-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        # A packet larger than the burst of the rate limit would be dropped.
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up", "mtu", "1500"], check=True)
        limit_bandwidth(name, "lo", mbit_s)
        # MPI's daemons use no loopback. What this machine sends to its other address passes it all the same.
        run_ip(
            name,
            "link add mpi0 type veth peer name mpi1",
            "addr add 198.51.100.1/32 dev mpi0",
            "link set mpi0 up",
            "link set mpi1 up",
        )
        with entered(name):
            yield
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def run_program(code: str, *arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """Run Python code in a process of its own; return the JSON of the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def write_plan(directory: Path, job: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Write plan.yaml with these ranks, for the job file `job`."""
    path = directory / job
    plan = {
        "job": path.stem,
        "job_fingerprint": load_job(path).fingerprint(),
        "method": "manual",
        "ranks": list(ranks),
    }
    (directory / "plan.yaml").write_text(yaml.safe_dump(plan))


def place_sample(directory: Path, name: str, *options: str) -> None:
    """Write a sample data set to `directory` and its nodes."""
    command = [sys.executable, str(EXAMPLES / "sample_data.py"), name, *options]
    subprocess.run(command, cwd=directory, check=True)
