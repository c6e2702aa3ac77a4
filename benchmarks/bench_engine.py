"""The training engine in the lab: a host and four nodes at 22% of a core each, one thread per rank.

    make bench ARGS="-k engine"

MobileNetV2, 64×64×3, 200 classes. Horovod 0.28.1 is built once into a
separate environment below CSDCTL_BENCH_PEERS (about ten minutes, Debian's packages, root); without it, its
comparison is skipped with a message.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running import CLIENTS, CSDCTL, PEERS, run_program, write_plan
from benchmarks.slow_nodes import CPU, MOBILENET, NETWORK, write_fleet, write_job
from csdctl.emulation.limits import plan_quota
from tests.lab.lab import Lab
from tests.lab.machines import LabNode
from tests.lab.project import Project

NUM_NODES = 4
BATCH_SIZES = (384, 92)
"""Batch sizes of the host and of a node, before rebalancing."""
MICRO_BATCH = 64
STEPS = {"3 s": BATCH_SIZES, "500 ms": (64, 15), "50 ms": (6, 1)}
"""Batch sizes of the host and of a node by the length of a step."""
HOROVOD_EQUAL = (32, 8)
HOROVOD_S = 30
NUM_IMAGES = 12_000
WATCH_STEPS = 20


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> Iterator[list[LabNode]]:
    with ExitStack() as stack:
        yield [stack.enter_context(lab.node(f"slow{n}", 40 + n, cpu=CPU)) for n in range(NUM_NODES)]


@pytest.fixture(scope="module")
def project(lab: Lab, nodes: list[LabNode], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with data; `start` adds a plan."""
    project = Project(lab, tmp_path_factory.mktemp("engine"))
    project.trust(*nodes)
    write_fleet(project, nodes)
    write_job(project, "job", MOBILENET, NUM_IMAGES)
    return project


@dataclass
class Running:
    """A running training, observed through its events."""

    process: subprocess.Popen[str]
    events_path: Path

    def events(self, *types: str) -> list[tuple[float, dict[str, Any]]]:
        """Time of arrival and content of the events of these types so far."""
        found = []
        for line in self.events_path.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] in types:
                found.append((event["time"], event))
        return found

    def progress(self, rank: int = 0) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event) for at, event in self.events("Progress") if event["rank"] == rank]

    def wait_for(self, condition: Callable[[], bool], deadline_s: float = 300) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)

    def wait_for_steps(self, count: int) -> None:
        """Wait until rank 0 has done `count` more steps."""
        before = sum(event["steps"] for _, event in self.progress())
        self.wait_for(lambda: sum(event["steps"] for _, event in self.progress()) >= before + count)


def start(
    project: Project,
    *options: str,
    job: str = "job.yaml",
    batch_sizes: tuple[int, int] = BATCH_SIZES,
    program: Sequence[str] = (str(CSDCTL),),
) -> Running:
    """Start `csdctl train`, and return after its first steps."""
    names = ["host", *(f"slow{n}" for n in range(NUM_NODES))]
    sizes = [batch_sizes[0]] + [batch_sizes[1]] * NUM_NODES
    settings = {"threads": 1, "micro_batch_size": MICRO_BATCH}
    ranks = [{"node": name, "batch_size": size, **settings} for name, size in zip(names, sizes, strict=True)]
    write_plan(project.path, job, ranks)
    before = set((project.path / ".csdctl").glob("runs/*"))
    command = (*program, "train", job, "--plan", "plan.yaml", "--skip-doctor", *options)
    process = project.lab.host.start(*command, cwd=project.path)
    end = time.monotonic() + 400
    new: set[Path] = set()
    while not new:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)
        found = (project.path / ".csdctl").glob("runs/*/events.jsonl")
        new = {path for path in found if path.parent not in before}
    running = Running(process, new.pop())
    running.wait_for(lambda: bool(running.progress()), 400)
    return running


def stop(running: Running) -> None:
    running.process.send_signal(2)
    running.process.communicate(timeout=120)


def rates(running: Running, since: float, until: float) -> tuple[float, float]:
    """Return samples/s in a time span: of the run, and the sum of its ranks' while they compute."""
    of_run = [event for at, event in running.progress() if since < at <= until]
    together = sum(event["global_samples"] for event in of_run) / sum(event["wall_s"] for event in of_run)
    apart = 0.0
    for rank in range(NUM_NODES + 1):
        own = [event for at, event in running.progress(rank) if since < at <= until]
        if own:
            apart += sum(event["samples"] for event in own) / sum(event["compute_s"] for event in own)
    return together, apart


def set_cpu(node: LabNode, cpu: float) -> None:
    assert node._cgroup
    quota, period = plan_quota(cpu)
    path = node._cgroup.path
    if (path / "cpu.max").exists():
        (path / "cpu.max").write_text(f"{quota} {period}")
    else:
        (path / "cpu.cfs_quota_us").write_text(str(quota))


def test_engine_in_the_lab(project: Project, nodes: list[LabNode]) -> None:
    running = start(project)
    try:
        running.wait_for_steps(22)
        start_time = time.time()
        running.wait_for_steps(20)
        together, apart = rates(running, start_time, time.time())
        print(
            f"\nin step {together:.0f} samples/s, the same ranks computing {apart:.0f}: "
            f"{together / apart:.3f}"
        )
        sizes = running.events("Joined", "Rebalanced")[-1][1]["batch_sizes"]
        print(f"batch sizes {sizes}")

        node = nodes[1]
        set_cpu(node, CPU / 2)
        slowed = time.time()
        running.wait_for_steps(WATCH_STEPS)
        after = time.time()
        running.wait_for_steps(15)
        slow_together, slow_apart = rates(running, after, time.time())
        print(
            f"one node at half speed: {slow_together:.0f} samples/s from step {WATCH_STEPS} on, "
            f"ceiling {slow_apart:.0f}: {slow_together / slow_apart:.3f} (before: {together / apart:.3f})"
        )
        first = [at for at, _ in running.events("Rebalanced") if at > slowed]
        print(f"first rebalanced after {first[0] - slowed:.1f} s" if first else "never rebalanced")
        set_cpu(node, CPU)

        killed = time.time()
        subprocess.run(["pkill", "-9", "-f", "^[^ ]*prterun|^[^ ]*mpirun"], check=False)
        print_gap(running, killed, "all mpiruns killed")
        running.wait_for_steps(2)
        killed = time.time()
        nodes[3].power_off()
        print_gap(running, killed, "node switched off")
        nodes[3].restart()
    finally:
        stop(running)


def print_gap(running: Running, killed: float, what: str) -> None:
    """Print the time until rank 0 has gone on without the others, and until its next report of steps."""
    running.wait_for(lambda: any(at > killed for at, _ in running.events("Joined")))
    went_on = next(at for at, _ in running.events("Joined") if at > killed)
    running.wait_for(lambda: any(at > went_on for at, _ in running.progress()))
    reported = min(at for at, _ in running.progress() if at > went_on)
    print(f"{what}: went on after {went_on - killed:.1f} s, steps reported after {reported - killed:.1f} s")


def test_engine_against_horovod(project: Project, nodes: list[LabNode], horovod: Path) -> None:
    """Horovod takes the batch sizes of csdctl after rebalancing, then equal ones, in one start."""
    found: dict[str, list[float]] = {}
    for _ in range(int(os.environ.get("CSDCTL_BENCH_ROUNDS", "1"))):
        lists: dict[str, list[int]] = {}
        for name, sizes in STEPS.items():
            running = start(project, batch_sizes=sizes)
            try:
                running.wait_for_steps(12)
                start_time = time.time()
                time.sleep(HOROVOD_S)
                ours, apart = rates(running, start_time, time.time())
                found.setdefault(f"csdctl, steps of {name}", []).append(ours)
                found.setdefault(f"csdctl, steps of {name}, of its ranks alone", []).append(ours / apart)
                last = running.events("Joined", "Rebalanced")[-1][1]["batch_sizes"]
                lists[f"Horovod, steps of {name}, the same batch sizes"] = list(last.values())
            finally:
                stop(running)
        for size in HOROVOD_EQUAL:
            lists[f"Horovod, {size} on every rank"] = [size] * (NUM_NODES + 1)
        theirs = run_horovod(project, nodes, horovod, [*lists.values()])
        for name, rate in zip(lists, theirs, strict=True):
            found.setdefault(name, []).append(rate)
        print(f"batch sizes {lists}")
        for what, measured in found.items():
            runs = ", ".join(f"{rate:.4g}" for rate in measured)
            print(f"{what}: {statistics.median(measured):.4g} (runs: {runs})", flush=True)


@pytest.fixture(scope="module")
def horovod() -> Path:
    """Return the Python of an environment with Horovod; build the environment if it is missing."""
    environment = Path(os.environ.get(PEERS, "/var/tmp/csdctl-peers")) / "horovod"
    if not (environment / "done").exists():
        build = CLIENTS / "build_horovod.sh"
        if subprocess.run(["bash", build, environment], check=False).returncode:
            pytest.skip("NOT MEASURED: Horovod could not be built")
    return environment / "bin" / "python"


def run_horovod(
    project: Project, nodes: list[LabNode], python: Path, lists: Sequence[Sequence[int]]
) -> list[float]:
    """Return the samples/s of Horovod for each list of batch sizes: Debian's Open MPI, the lab's SSH."""
    config = project.path / "horovod_ssh_config"
    config.write_text(
        "".join(f"Host {node.name}\n  HostName {node.spec.address}\n  User root\n" for node in nodes)
        + f"Host *\n  IdentityFile {project.lab.key}\n"
        f"  UserKnownHostsFile {project.path}/.csdctl/known_hosts\n  BatchMode yes\n  ConnectTimeout 20\n"
        + "".join(f"Host {node.name}\n  HostKeyAlias {node.spec.address}\n" for node in nodes)
    )
    hosts = ",".join(["localhost:1", *(f"{node.name}:1" for node in nodes)])
    command = [
        *("/usr/bin/mpirun", "--allow-run-as-root", "--host", hosts, "--map-by", "node", "--bind-to", "none"),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", NETWORK),
        *("--mca", "oob_tcp_if_include", NETWORK, "--mca", "plm_rsh_agent", f"ssh -F {config}"),
        *("--mca", "plm_rsh_no_tree_spawn", "1", "-x", "PATH"),
        *(str(python), str(CLIENTS / "horovod_client.py"), str(HOROVOD_S)),
        *(",".join(map(str, sizes)) for sizes in lists),
    ]
    done = project.lab.host.run(
        *command,
        cwd=project.path,
        environment={"PATH": f"/usr/bin:/bin:{os.environ['PATH']}", "TMPDIR": "/tmp"},
    )
    found = [line for line in done.stdout.splitlines() if "samples_per_s" in line]
    assert len(found) == len(lists), done.stdout[-2000:] + done.stderr[-3000:]
    return [float(line.split()[1]) for line in found]


ALONE = """
import json, statistics, time
import numpy as np
from csdctl.worker.compute.backend import load_backend
tf, keras = load_backend()
from csdctl.worker.compute.recipe import compile_model
from tests.unit.worker.compute.built_models import Step
from csdctl.worker.protocol.recipe import Recipe

SIZE, STEPS, ROUNDS = 32, 12, 9
recipe = Recipe(optimizer="sgd", optimizer_args={"momentum": 0.9}, learning_rate=0.01)
generator = np.random.default_rng(0)
images = generator.integers(0, 256, (SIZE * STEPS, 64, 64, 3), np.uint8)
labels = generator.integers(0, 200, SIZE * STEPS).astype(np.int32)

def build():
    return keras.applications.MobileNetV2(input_shape=(64, 64, 3), classes=200, weights=None)

inputs = keras.Input((64, 64, 3), dtype="uint8")
peer = keras.Model(inputs, build()(keras.layers.Rescaling(1 / 255.0)(inputs)))
sgd = keras.optimizers.SGD(0.01, momentum=0.9)
peer.compile(sgd, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
model = build()
step = Step(model, compile_model(model, recipe), (images[:0], labels[:0]))

def fit():
    peer.fit(images, labels, batch_size=SIZE, epochs=1, verbose=0, shuffle=True)

def ours():
    order = generator.permutation(len(images))
    for start in range(0, len(order), SIZE):
        rows = np.sort(order[start : start + SIZE])
        step.set_step(start, 0.01)
        step.alone(images[rows], labels[rows])

fit(); ours()
ratios, times = [], {"fit": [], "ours": []}
for number in range(ROUNDS):
    for name, do in (("fit", fit), ("ours", ours)) if number % 2 else (("ours", ours), ("fit", fit)):
        started = time.perf_counter()
        do()
        times[name].append((time.perf_counter() - started) / STEPS)
    ratios.append(times["ours"][-1] / times["fit"][-1])
fit_ms, our_ms = (statistics.median(times[name]) * 1000 for name in ("fit", "ours"))
print(json.dumps({"fit_ms": fit_ms, "our_ms": our_ms, "ratios": ratios}))
"""


def test_one_rank_against_keras_fit() -> None:
    found = run_program(ALONE)
    rounds = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
    print(
        f"\nKeras fit {found['fit_ms']:.1f} ms per step, csdctl {found['our_ms']:.1f} ms; "
        f"ratio {statistics.median(found['ratios']):.3f} (rounds: {rounds})"
    )
