"""MobileNetV2 behind 100 Mbit/s: gradients as float32 and as bfloat16.

    make bench ARGS="-k compression"

The lab: a host and three nodes at 22% of a core each, one thread per rank, MobileNetV2 with 64×64×3 pixels,
batches of equal sizes, in turn. Prints figures, asserts only that both trained.
"""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.running import CSDCTL, read_documents, write_plan
from benchmarks.slow_nodes import CPU, MOBILENET, write_fleet, write_job
from tests.lab.lab import Lab
from tests.lab.machines import INTERFACE, LabNode
from tests.lab.network import limit_bandwidth
from tests.lab.project import Project

NUM_NODES, MBIT_PER_S = 3, 100
BATCH_SIZES = (96, 24)
ROUNDS, STEPS = 5, 20


@pytest.fixture(scope="module")
def project(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with ExitStack() as stack:
        nodes = [stack.enter_context(lab.node(f"slow{n}", 40 + n, cpu=CPU)) for n in range(NUM_NODES)]
        for node in nodes:
            limit_bandwidth(node.namespace, INTERFACE, MBIT_PER_S)
            limit_bandwidth(lab.host.namespace, f"p-{node.name}", MBIT_PER_S)
        yield make_project(lab, nodes, tmp_path_factory.mktemp("compression"))


def make_project(lab: Lab, nodes: list[LabNode], directory: Path) -> Project:
    project = Project(lab, directory)
    project.trust(*nodes)
    write_fleet(project, nodes)
    write_job(project, "job", MOBILENET, 4000)
    job = (directory / "job.yaml").read_text()
    (directory / "bf16.yaml").write_text(job.replace("recipe: {", "recipe: {compression: bf16, "))
    return project


def test_compression(project: Project) -> None:
    names = ["host", *(f"slow{n}" for n in range(NUM_NODES))]
    sizes = [BATCH_SIZES[0]] + [BATCH_SIZES[1]] * NUM_NODES
    pairs = zip(names, sizes, strict=True)
    ranks = [{"node": name, "batch_size": size, "threads": 1} for name, size in pairs]
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for job in ("job.yaml", "bf16.yaml"):
            write_plan(project.path, job, ranks)
            options = ("--plan", "plan.yaml", "--skip-doctor", "--max-steps", str(STEPS), "--json")
            running = project.lab.host.start(str(CSDCTL), "train", job, *options, cwd=project.path)
            report = read_documents(running.communicate()[0])[-1]
            assert report["steps"] == STEPS
            waits = [round(1000 * rank["wait_s"] / STEPS) for rank in report["ranks"]]
            found.setdefault(job, []).append(report["samples_per_s"])
            print(f"\n{job}: {report['samples_per_s']:.1f} samples/s, waits {waits} ms")
    for job, rates in found.items():
        span = f"{min(rates):.1f} to {max(rates):.1f}"
        print(f"{job}: median {statistics.median(rates):.1f} samples/s ({span})")
