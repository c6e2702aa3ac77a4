"""Train for a while under faults that come at random, then judge the run by oracles.

    python -m tests.soak.soak --fleet lab --seconds 3600 --seed 1 --keep DIRECTORY

Prints one JSON object. Exits with 1 when an oracle finds something; the project is then kept in DIRECTORY.
The project and /dev/shm are small file systems of the soak's own, which can be filled.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.add_up_events import add_up
from tests.emulated.training import assert_all_read_once
from tests.needs import SYSTEM_PATH
from tests.patience import communicate, eventually, scaled
from tests.soak.commands import CSDCTL, Commands
from tests.soak.fleets import SoakFleet, open_fleet, signal_processes

CLONE_NEWNS = 0x20000
NUM_PUBLIC, NUM_PRIVATE = 1200, 100
PROJECT_BYTES, MEMORY_BYTES = 400 << 20, 200 << 20
"""Sizes of the file system of the project, and of /dev/shm."""
MAX_PAUSE_S, MAX_FAULT_S = 6.0, 25.0
"""Longest pause before a fault, and longest fault."""
RECOVERY_S = 300.0
"""All ranks must take part again by then, scaled."""
STEADY_S = 3.0
"""All ranks take part again when they do so for this long."""
MEMORY_GROWTH = 1.5
"""Allowed growth of csdctl's memory."""
JOB = """\
model: MODEL
data:
  public: {path: public.npz}
  private: {path: ~/private.npz, activations: may-leave}
  validation: {path: validation.npz}
recipe: {epochs: 1000000, optimizer: adam, learning_rate: 0.001, seed: 7}
"""
MODEL = """\
import keras
from keras import layers


def build(trainable=False):
    inputs = keras.Input((16, 16, 1))
    x = layers.Conv2D(8, 3, activation="relu", trainable=trainable)(inputs)
    x = layers.BatchNormalization(trainable=trainable, name="cut")(x)
    x = layers.Conv2D(16, 3, activation="relu")(x)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def build_trained():
    return build(trainable=True)
"""
STRATEGIES = {
    "data-parallel": ("model.py:build_trained",),
    "features": ("model.py:build", "--strategy", "features"),
    "split": ("model.py:build_trained", "--strategy", "split", "--cut", "cut"),
}
"""The model of each, and options of `train`."""
SHARES = (5, 3, 2)
"""How often each is chosen."""
WITH_CLOCK = """
import pathlib, sys, time
clock, now = pathlib.Path(sys.argv.pop(1)), time.time
time.time = lambda: now() + int(clock.read_text() or 0)
from csdctl.cli.app import main
sys.exit(main())
"""
"""csdctl, whose clock is off by the seconds in a file."""
NUM_LOOKS, LOOK_S = 10, 0.1
HOG = "b = bytearray({size}); b[::4096] = bytes([1]) * len(b[::4096])\nwhile True: pass"


@dataclass
class Applied:
    """A fault that was applied, and what came of it."""

    kind: str
    at_s: float
    """Seconds since the soak began."""
    lasted_s: float = 0.0
    recovered_s: float | None = None
    """From the end of the fault until all ranks took part again. None: the next fault came before."""


@dataclass
class Census:
    """What csdctl holds at a moment when all ranks take part."""

    descriptors: int
    threads: int
    connections: int
    memory_mib: int


@dataclass
class Outcome:
    """What a soak has come to."""

    fleet: str
    seed: int
    seconds: float
    strategy: str
    options: list[str]
    faults: list[Applied] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Each end of csdctl before the last one: its exit code and last line."""
    num_starts: int = 0
    num_calm_starts: int = 0
    """Starts after csdctl had ended without having been killed at that moment."""
    steps: int = 0
    steps_replayed: int = 0
    """Steps that the replay took, among them those that the run lost and repeated."""
    steps_repeated: int = 0
    """Steps that rank 0 had reported, and took again after its loss."""
    hashes: int = 0
    """Hashes of weights that the replay has come to as well."""
    census: dict[int, tuple[Census, Census]] = field(default_factory=dict)
    """The first and the last of each csdctl, by its process id."""
    commands: dict[str, list[int]] = field(default_factory=dict)
    """Exit codes of commands that were disturbed, by command and fault."""
    problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        recoveries = sorted(fault.recovered_s for fault in self.faults if fault.recovered_s is not None)
        times = {
            "median": statistics.median(recoveries) if recoveries else None,
            "95%": recoveries[int(0.95 * (len(recoveries) - 1))] if recoveries else None,
            "worst": recoveries[-1] if recoveries else None,
        }
        counts = Counter(fault.kind for fault in self.faults)
        census = {pid: [asdict(part) for part in pair] for pid, pair in self.census.items()}
        slowest = [asdict(fault) for fault in sorted(self.faults, key=lambda it: -(it.recovered_s or 0))[:5]]
        return {**asdict(self), "faults": counts, "recovery_s": times, "slowest": slowest, "census": census}


class Soak:
    """One training under faults."""

    def __init__(self, fleet: SoakFleet, outcome: Outcome, chosen: random.Random, scratch: Path) -> None:
        self.fleet, self.outcome, self.chosen, self.scratch = fleet, outcome, chosen, scratch
        self.began = time.monotonic()
        self.run = Path()
        self.process: subprocess.Popen[str] | None = None
        self.places: dict[int, Path] = {}
        self.only = ""
        """Only faults with this in their name come."""
        self.printed: list[str] = []
        self._start = 0
        """Size of the event log when csdctl was started."""
        self._clock = scratch / "clock"
        self._clock.write_text("0")

    # csdctl

    def start(self) -> None:
        """Start the training, and wait until all ranks take part."""
        self._begin("train", "--batch-size", "8", "--skip-doctor", "--min-nodes", "0", *self.outcome.options)
        runs = self.fleet.project / ".csdctl" / "runs"
        while not [*runs.glob("*/events.jsonl")]:
            assert self.csdctl.poll() is None, self.last_lines()
            time.sleep(0.2)
        [self.run] = runs.iterdir()
        self._await_all()
        self.began = time.monotonic()

    def _begin(self, *arguments: str) -> None:
        self.outcome.num_starts += 1
        with contextlib.suppress(OSError):
            self._start = (self.run / "events.jsonl").stat().st_size
        self.process = self.fleet.start(sys.executable, "-c", WITH_CLOCK, str(self._clock), *arguments)
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._keep, args=(stream,), daemon=True).start()

    def _keep(self, stream: Any) -> None:
        with (self.scratch / "csdctl.log").open("a") as log:
            for line in stream:
                log.write(f"{self.seconds:8.1f} {line}")
                log.flush()
                self.printed.append(line.rstrip())

    @property
    def seconds(self) -> float:
        """Seconds since the soak began."""
        return round(time.monotonic() - self.began, 1)

    def _count_printed(self) -> int:
        return len(self.printed)

    def last_lines(self) -> str:
        return "\n".join(self.printed[-15:])

    @property
    def csdctl(self) -> "subprocess.Popen[str]":
        """The process that trains, or the last one that did."""
        assert self.process
        return self.process

    def revive(self, *, is_calm: bool) -> None:
        """Resume the run if csdctl has ended. Without a fault, it may be necessary once."""
        if self.csdctl.poll() is None:
            return
        self._note_end()
        self._begin("train", "--resume", "latest", "--skip-doctor", "--min-nodes", "0")
        if is_calm:
            self.outcome.num_calm_starts += 1

    def _note_end(self) -> None:
        last = next((line for line in reversed(self.printed) if line.strip()), "")
        self.outcome.ends.append(f"{self.csdctl.returncode}: {last[:200]}")

    def _await_all(self) -> float:
        """Wait until all ranks take part, and resume the run if necessary. Return the seconds."""
        began = time.monotonic()
        since: float | None = None
        while since is None or time.monotonic() - since < STEADY_S:  # a loss is noted after a moment
            self.revive(is_calm=True)
            waited_s = time.monotonic() - began
            limit_s = scaled(RECOVERY_S)
            assert waited_s < limit_s, f"not recovered after {waited_s:.0f} s:\n{self.last_lines()}"
            if not self._are_all_back():
                since = None
            elif since is None:
                since = time.monotonic()
            time.sleep(0.2)
        return since - began

    def _are_all_back(self) -> bool:
        """Whether all ranks take part, and rank 0 has done steps since."""
        if self.csdctl.poll() is not None:
            return False
        with contextlib.suppress(OSError, ValueError, KeyError):
            with (self.run / "events.jsonl").open("rb") as file:
                file.seek(self._start)
                text = file.read().decode(errors="replace")
            _, joined, since = text.rpartition('"event":"Joined"')
            members = json.loads("{" + joined + since.partition("\n")[0])["batch_sizes"]
            is_lost = '"event":"NodeLost"' in since
            has_stepped = any(f'"{name}","rank":0' in since for name in ("Progress", "EpochEnd"))
            return len(members) == 1 + len(self.fleet.nodes) and has_stepped and not is_lost
        return False

    # Faults

    def faults(self) -> dict[str, Callable[[], AbstractContextManager[object]]]:
        """Return the faults that can come now, by name. Each lasts as long as its block."""
        chosen, kinds = self.chosen, self.fleet.kinds(self.run, self.csdctl.pid)
        faults: dict[str, Callable[[], AbstractContextManager[object]]] = {}
        for kind, pids in sorted(kinds.items()):
            if pids:
                faults[f"{kind} killed"] = lambda pids=pids: self._signalled([chosen.choice(pids)], "KILL")
                faults[f"{kind} stopped"] = lambda pids=pids: self._signalled([chosen.choice(pids)], "STOP")
        for name, fault in self.fleet.faults.items():
            faults[name] = lambda fault=fault: fault(chosen.choice(self.fleet.nodes))
        faults["disk of the host full"] = lambda: filled(self.fleet.project)
        faults["/dev/shm of the host full"] = lambda: filled(Path("/dev/shm"))
        faults["processors and memory taken"] = lambda: hogs(2, 1 << 30)
        faults["clock of csdctl moved"] = self._moved_clock
        faults["host rebooted"] = self._rebooted
        return faults

    @contextmanager
    def _signalled(self, pids: list[int], name: str) -> Iterator[None]:
        signal_processes(pids, f"SIG{name}")
        try:
            yield
        finally:
            if name == "STOP":
                signal_processes(pids, "SIGCONT")

    @contextmanager
    def _moved_clock(self) -> Iterator[None]:
        self._clock.write_text(f"{self.chosen.choice((-86400, -3600, 3600, 86400))}")
        try:
            yield
        finally:
            self._clock.write_text("0")

    @contextmanager
    def _rebooted(self) -> Iterator[None]:
        """All processes of the host are gone at once, and what was in its memory."""
        kinds = self.fleet.kinds(self.run, self.csdctl.pid)
        on_host = ("csdctl", "rank 0", "hub", "mpirun", "link on the host")
        signal_processes([pid for kind in on_host for pid in kinds[kind]], "SIGKILL")
        for path in Path("/dev/shm").glob("csdctl-*/*"):
            path.unlink()
        yield

    def soak(self) -> None:
        """Let faults come until the time is over, then let the run recover and stop it."""
        chosen, waits = self.chosen, Counter[str]()
        while self.seconds < self.outcome.seconds:
            time.sleep(chosen.uniform(0, MAX_PAUSE_S))
            self.revive(is_calm=False)
            faults = {name: fault for name, fault in self.faults().items() if self.only in name}
            if not faults:
                continue
            # Kinds that came less often are more likely, so that each of them comes.
            kind = min(faults, key=lambda name: (waits[name], chosen.random()))
            waits[kind] += 1
            fault = Applied(kind, self.seconds)
            self.outcome.faults.append(fault)
            print(f"{self.seconds:8.1f} {kind}", file=sys.stderr, flush=True)
            is_short = kind.endswith("killed") or kind == "host rebooted"
            with faults[kind]():
                time.sleep(0 if is_short else chosen.uniform(1, MAX_FAULT_S))
            fault.lasted_s = round(self.seconds - fault.at_s, 1)
            if chosen.random() < 0.7:  # else another fault comes before it has recovered
                fault.recovered_s = round(self._await_all(), 1)
                self._count()
        self._await_all()
        self._count()
        self.csdctl.send_signal(signal.SIGINT)
        assert eventually(lambda: self.csdctl.poll() is not None, self._count_printed), self.last_lines()
        if self.csdctl.returncode != 130:
            self.outcome.problems.append(f"csdctl ended with {self.csdctl.returncode}:\n{self.last_lines()}")

    def _count(self) -> None:
        """Note what csdctl holds while all ranks take part, and where ranks work."""
        self.places |= self.fleet.working_directories(self.run)
        place, status = Path(f"/proc/{self.csdctl.pid}"), ""
        with contextlib.suppress(OSError):
            status = (place / "status").read_text()
            looks = []
            for _ in range(NUM_LOOKS):  # some are open for a moment
                looks.append([os.readlink(path) for path in (place / "fd").iterdir()])
                time.sleep(LOOK_S)
            links = min(looks, key=len)
            fields = dict(line.split(":", 1) for line in status.splitlines())
            now = Census(
                descriptors=len(links),
                threads=int(fields["Threads"]),
                connections=sum(link.startswith("socket:") for link in links),
                memory_mib=int(fields["VmRSS"].split()[0]) >> 10,
            )
            first, _ = self.outcome.census.get(self.csdctl.pid, (now, now))
            self.outcome.census[self.csdctl.pid] = first, now

    # Oracles

    def judge(self) -> None:
        """Note everything that is not as it must be."""
        for oracle in (self._judge_samples, self._judge_figures, self._judge_weights, self._judge_leaks):
            try:
                oracle()
            except AssertionError as error:
                self.outcome.problems.append(f"{oracle.__name__.removeprefix('_judge_')}: {error}"[:4000])
        traces = [line for line in self.printed if "Traceback" in line]
        if traces:
            self.outcome.problems.append(f"{len(traces)} tracebacks of csdctl")

    def _judge_samples(self) -> None:
        assert_all_read_once(self.run, NUM_PUBLIC + len(self.fleet.nodes) * NUM_PRIVATE)

    def _judge_figures(self) -> None:
        """The report says what code that shares nothing with it adds up from the log."""
        process = self.fleet.start(CSDCTL, "report", self.run.name, "--json")
        output, errors = communicate(process)
        assert process.returncode == 0, output + errors
        report, added = json.loads(output), add_up(self.run / "events.jsonl")
        self.outcome.steps = added["steps"]
        self.outcome.steps_repeated = count_repeated(self.run / "events.jsonl")
        assert not report["num_breaks"], "lines of the log are lost or repeated"
        for name in ("steps", "samples", "epochs"):
            assert report[name] == added[name], f"{name}: {report[name]}, expected {added[name]}"
        for name in ("training_s", "samples_per_s"):
            assert is_near(report[name], added[name]), f"{name}: {report[name]}, expected {added[name]}"
        for rank in report["ranks"]:
            expected = added["ranks"][rank["rank"]]
            for name in ("samples_per_s", "compute_s", "wait_s"):
                assert is_near(rank[name], expected[name]), f"{rank}: expected {expected}"

    def _judge_weights(self) -> None:
        """A training without faults, with the same members in each step, has the same weights."""
        places = self.scratch / "places.json"
        places.write_text(json.dumps({rank: str(path) for rank, path in self.places.items()}))
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.replay", str(self.run), str(places)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        replayed = json.loads(done.stdout)
        self.outcome.hashes, self.outcome.steps_replayed = replayed["hashes"], replayed["steps"]

    def _judge_leaks(self) -> None:
        assert eventually(lambda: not self.fleet.left(self.run)), self.fleet.left(self.run)
        for pid, (first, last) in self.outcome.census.items():
            grown = (
                last.descriptors > first.descriptors
                or last.threads > first.threads
                or last.connections > first.connections
                or last.memory_mib > MEMORY_GROWTH * first.memory_mib
            )
            assert not grown, f"csdctl {pid} had {first}, then {last}"
        parts = [str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()]
        assert not parts, f"left in memory: {parts}"
        asides = [str(path) for path in (self.fleet.project / ".csdctl").rglob(".*") if path.is_file()]
        assert not asides, f"unfinished files: {asides}"


def count_repeated(path: Path) -> int:
    """Count the steps that rank 0 had reported before it began again from an earlier one."""
    num_repeated, per_epoch, latest = 0, 0, (1, 0)
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["rank"] == 0 and event["event"] == "Progress":
            latest = event["epoch"], event["step"]
        elif event["rank"] == 0 and event["event"] == "EpochEnd":  # a short epoch has no other report
            latest = event["epoch"] + 1, 0
        elif event["event"] == "Joined":
            per_epoch, at = event["steps_per_epoch"], (event["epoch"], event["step"])
            if event["is_start"] and at < latest:
                num_repeated += (latest[0] - at[0]) * per_epoch + latest[1] - at[1]
            latest = at if event["is_start"] else latest
    return num_repeated


def is_near(value: float | None, expected: float | None) -> bool:
    """Whether two figures agree but for rounding."""
    if value is None or expected is None:
        return value is expected
    return abs(value - expected) <= 1e-6 * max(abs(value), abs(expected)) + 1e-4


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Fill the file system of a directory."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def hogs(count: int, num_bytes: int = 0) -> Iterator[None]:
    """Keep processors busy, and memory of this size each in use."""
    command = [sys.executable, "-c", HOG.format(size=num_bytes)]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def write_samples(path: Path, count: int) -> None:
    """Write samples of three classes."""
    generator = np.random.default_rng(count)
    pictures = generator.integers(0, 256, (count, 16, 16, 1), dtype=np.uint8)
    np.savez(path, x=pictures, y=np.arange(count) % 3)


@contextmanager
def small_disks() -> Iterator[Path]:
    """Yield a project directory on a file system of its own. /dev/shm is another one. Both can be filled."""
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        project = Path(place, "p")
        project.mkdir(mode=0o700)
        mounts = ((project, PROJECT_BYTES), (Path("/dev/shm"), MEMORY_BYTES))
        for directory, size in mounts:
            command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(directory)]
            subprocess.run(command, check=True)
        project.chmod(0o700)
        try:
            yield project
        finally:
            for directory, _ in mounts:
                subprocess.run(["umount", "--lazy", str(directory)], check=True)


def soak(arguments: argparse.Namespace) -> Outcome:
    """Soak a fleet as the command line says."""
    seconds, keep, chosen = arguments.seconds, arguments.keep, random.Random(arguments.seed)
    options = [] if chosen.random() < 0.5 else ["--no-rebalance"]
    strategy = arguments.strategy or chosen.choices([*STRATEGIES], SHARES)[0]
    model, *more = STRATEGIES[strategy]
    outcome = Outcome(arguments.fleet, arguments.seed, seconds, strategy, [*options, *more])
    with small_disks() as project, tempfile.TemporaryDirectory(prefix="soaklog-") as scratch:
        (project / "job.yaml").write_text(JOB.replace("MODEL", model))
        (project / "model.py").write_text(MODEL)
        write_samples(project / "public.npz", NUM_PUBLIC)
        write_samples(project / "validation.npz", 60)
        with open_fleet(arguments.fleet, project) as fleet:
            for node in fleet.nodes:
                write_samples(fleet.home(node) / "private.npz", NUM_PRIVATE)
            soaked = Soak(fleet, outcome, chosen, Path(scratch))
            soaked.only = arguments.only
            try:
                soaked.start()
                soaked.soak()
                soaked.judge()
                commands = Commands(fleet, chosen, write_samples)
                commands.disturb(seconds / 5)
                outcome.commands = commands.codes
                outcome.problems += commands.problems
            except AssertionError as error:
                outcome.problems.append(str(error)[:4000])
            finally:
                if soaked.process and soaked.process.poll() is None:
                    soaked.process.send_signal(signal.SIGINT)
                    soaked.process.wait()
                if outcome.problems and keep:
                    shutil.copytree(project, keep / "project", symlinks=True, ignore=sockets)
                    shutil.copytree(scratch, keep / "scratch")
    return outcome


def sockets(directory: str, names: list[str]) -> list[str]:
    """Return what cannot be copied."""
    return [name for name in names if not (Path(directory, name).is_file() or Path(directory, name).is_dir())]


def main() -> None:
    """Soak as the command line says, in a mount namespace of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fleet", choices=("emulated", "lab"), default="emulated")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", choices=[*STRATEGIES], default="", help="default: by the seed")
    parser.add_argument("--only", default="", help="faults whose names have this")
    parser.add_argument("--keep", type=Path, help="directory for what a soak with problems has left")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        parser.error("needs root, for a mount namespace of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    os.environ["CSDCTL_EMULATE_PID"] = str(os.getpid())  # its fleet ends with it
    os.environ["PATH"] = f"{os.environ['PATH']}:{SYSTEM_PATH}"
    outcome = soak(arguments)
    print(json.dumps(outcome.summary(), indent=1))
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
