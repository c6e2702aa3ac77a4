"""Efficiency of short steps of the demo's network, and what the rest of a step is.

    make bench ARGS="-k short_steps"

A host and a node of an emulated fleet, one thread and one core each, in steps of 30 and 60 ms; then a host
and four nodes of the lab at 22% of a core each, in steps of about 85 and 220 ms. Efficiency is the throughput
over the sum of the ranks' samples by compute time in the same steps. Prints figures, asserts no limits.
"""

import json
import shutil
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from benchmarks.running import (
    CSDCTL,
    EXAMPLES,
    csdctl,
    emulated_fleet,
    place_sample,
    read_documents,
    write_plan,
)
from benchmarks.slow_nodes import CPU, SMALL, write_fleet, write_job
from tests.lab.lab import Lab
from tests.lab.project import Project

ROUNDS, STEPS = 5, 200
BATCH_SIZES = (110, 240)
NUM_NODES, FIVE_RANKS = 4, ((120, 26), (330, 73))
"""Batch sizes of the host and of a node, before rebalancing."""
MEASURED_S, HOST_RATE = 20, 1500
"""Seconds of a run, about, with so many samples/s of the host."""


def test_short_steps(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "fashion_mnist", tmp_path, dirs_exist_ok=True)
    with emulated_fleet(tmp_path, 1, 1.0, host_threads=1):
        place_sample(tmp_path, "fashion-mnist", "--private", "")
        job = yaml.load((tmp_path / "job.yaml").read_text(), yaml.BaseLoader)  # `on` is a string here
        job["data"].pop("private", None)
        (tmp_path / "short.yaml").write_text(yaml.safe_dump(job).replace("'", ""))
        for size in BATCH_SIZES:
            found = []
            for _ in range(ROUNDS):
                options = ("--batch-size", str(size), "--max-steps", str(STEPS), "--skip-doctor")
                report = csdctl(tmp_path, "train", "short.yaml", *options)[-1]
                ranks, steps = report["ranks"], report["steps"]
                apart = sum(size * steps / rank["compute_s"] for rank in ranks)
                found.append(report["samples_per_s"] / apart)
                waits = ", ".join(
                    f"{rank['node']} computes {1000 * rank['compute_s'] / steps:.1f} ms, "
                    f"waits {1000 * rank['wait_s'] / steps:.1f} ms"
                    for rank in ranks
                )
                print(f"\nbatch size {size}: {found[-1]:.3f} of its ranks alone; {waits}", flush=True)
            low, high = min(found), max(found)
            print(f"batch size {size}: median {statistics.median(found):.3f} ({low:.3f} to {high:.3f})")


def test_short_steps_of_five_ranks(lab: Lab, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = [stack.enter_context(lab.node(f"slow{n}", 40 + n, cpu=CPU)) for n in range(NUM_NODES)]
        project = Project(lab, tmp_path)
        project.trust(*nodes)
        write_fleet(project, nodes)
        write_job(project, "small", SMALL, 320_000)
        for host_batch, node_batch in FIVE_RANKS:
            sizes = {"host": host_batch, **dict.fromkeys((node.name for node in nodes), node_batch)}
            write_plan(
                tmp_path,
                "small.yaml",
                [{"node": n, "batch_size": size, "threads": 1} for n, size in sizes.items()],
            )
            steps = round(MEASURED_S * HOST_RATE / host_batch)
            found = [measure_parts(project, steps) for _ in range(ROUNDS)]
            for name in found[0]:
                values = [one[name] for one in found]
                text = ", ".join(f"{value:.4g}" for value in values)
                print(
                    f"{host_batch} and {node_batch}: {name}: {statistics.median(values):.4g} ({text})",
                    flush=True,
                )


def measure_parts(project: Project, steps: int) -> dict[str, float]:
    """Return the parts of the mean step in the second half of a run, in ms, and its efficiency.

    The ranks' mean time of computing; what the slowest rank needs more on average; what the slowest rank of
    each step needs more than that one; then communication. All
    steps are in one epoch.
    """
    options = ("--plan", "plan.yaml", "--skip-doctor", "--max-steps", str(steps), "--json")
    running = project.lab.host.start(str(CSDCTL), "train", "small.yaml", *options, cwd=project.path)
    output, errors = running.communicate()
    assert running.returncode == 0, errors[-2000:]
    report = read_documents(output)[-1]
    events = [json.loads(line) for line in (project.path / report["path"] / "events.jsonl").open()]
    late = [event for event in events if event["event"] == "Progress" and event["step"] > steps / 2]
    ranks = [[event for event in late if event["rank"] == rank] for rank in range(NUM_NODES + 1)]

    def per_step(own: list[dict[str, Any]], *names: str) -> float:
        return (
            1000 * sum(event[name] for event in own for name in names) / sum(event["steps"] for event in own)
        )

    computing = [per_step(own, "compute_s") for own in ranks]
    slowest = statistics.mean(per_step(own, "compute_s", "others_s") for own in ranks)
    step = statistics.mean(per_step(own, "compute_s", "wait_s") for own in ranks)
    samples = sum(event["global_samples"] for event in ranks[0]) / sum(event["steps"] for event in ranks[0])
    apart = sum(sum(e["samples"] for e in own) / sum(e["compute_s"] for e in own) for own in ranks)
    mean = statistics.mean(computing)
    return {
        "efficiency": samples / (step / 1000) / apart,
        "step": step,
        "computing": mean,
        "the slowest on average": max(computing) - mean,
        "the slowest of each step": slowest - max(computing),
        "communication": step - slowest,
    }
