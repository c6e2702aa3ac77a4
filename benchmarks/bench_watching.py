"""Cost for a training of drawing its view, and of being watched from another terminal.

    make bench ARGS="-k watching"

An emulated node and a small model, so that a step is short. Terminals are those of tmux, 200×50. The
watcher of one training is stopped and continued in turn, and trainings with the view and with -q alternate.

"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, stdev

import numpy as np
import psutil
import pytest

from benchmarks.running import CSDCTL, csdctl, emulated_fleet
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from csdctl.worker.protocol.events import EpochEnd
from tests.patience import eventually
from tests.tmux import Tmux

MODEL = """\
import keras


def build():
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(inputs))
"""
JOB = """\
model: model.py:build
data: {{public: {{path: public.npz}}, input_range: null}}
recipe: {{epochs: {epochs}, optimizer: sgd, learning_rate: 0.001, metrics: [accuracy]}}
"""
NUM_WINDOWS, WINDOW_S = 30, 2.5
"""Windows of each kind, and their length."""
NUM_PAIRS, SHORT_EPOCHS = 4, 60
TRAIN = ("train", "--batch-size", "64", "--skip-doctor")
SIZE = ("-x", "200", "-y", "50")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("watching")
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 4096, dtype=np.int32)
    np.savez(directory / "public.npz", x=generator.random((4096, 8), np.float32), y=labels)
    (directory / "model.py").write_text(MODEL)
    with emulated_fleet(directory, 1, 0.5):
        yield directory


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    found = Tmux(tmp_path)
    yield found
    found.close()


def samples_per_s(run: RunDirectory, begin_s: float, end_s: float) -> float:
    """Samples of all ranks per second, in the epochs that ended between two Unix times."""
    samples = wall_s = 0.0
    for time_s, event in run.read_events(["host", "csd0"]).with_times():
        if begin_s <= time_s <= end_s and isinstance(event, EpochEnd) and event.rank == 0:
            samples, wall_s = samples + event.global_samples, wall_s + event.wall_s
    return samples / wall_s


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_watching_beside_a_training(project: Path, tmux: Tmux) -> None:
    (project / "job.yaml").write_text(JOB.format(epochs=1_000_000))
    run_id = csdctl(project, *TRAIN, "--detach")[0]["run"]
    run = ProjectDirectory(project).find_run(run_id)
    # tmux continues its own children when they are stopped, so the watcher is a shell's.
    tmux.run("new-session", "-d", *SIZE, "-c", str(project), "sh", "-c", f"{CSDCTL} runs watch; true")
    shell = psutil.Process(int(tmux.run("display-message", "-p", "#{pane_pid}")))
    used, windows = {"watched": 0.0, "stopped": 0.0}, []
    try:
        assert eventually(lambda: any("samples/s  loss" in line for line in tmux.screen()))
        (watcher,) = shell.children()
        for pair in range(NUM_WINDOWS):
            for kind in ("watched", "stopped") if pair % 2 else ("stopped", "watched"):
                (watcher.resume if kind == "watched" else watcher.suspend)()
                before, begin_s = cpu_s(watcher), time.time()
                time.sleep(WINDOW_S)
                windows.append((kind, begin_s, time.time()))
                used[kind] += cpu_s(watcher) - before
    finally:
        for watcher in shell.children():
            watcher.kill()  # a stopped one does not hear the end of its terminal
        csdctl(project, "runs", "stop", run_id)
    minutes = NUM_WINDOWS * WINDOW_S / 60
    for kind, spent_s in used.items():
        print(f"\nwatcher, {kind}: {spent_s / minutes:.2f} s of CPU a minute", end="")
    rates = {kind: [samples_per_s(run, *of) for one, *of in windows if one == kind] for kind in used}
    ratios = [watched / stopped for watched, stopped in zip(*rates.values(), strict=True)]
    error = stdev(ratios) / NUM_WINDOWS**0.5
    print(f"\nsamples/s watched over those with the watcher stopped: {median(ratios):.3f} ± {error:.3f}")


def test_live_view_of_a_training(project: Path, tmux: Tmux) -> None:
    (project / "job.yaml").write_text(JOB.format(epochs=SHORT_EPOCHS))
    rates: dict[str, list[float]] = {"view": [], "quiet": []}
    used: dict[str, list[float]] = {"view": [], "quiet": []}
    for pair in range(NUM_PAIRS):
        for kind in ("view", "quiet") if pair % 2 else ("quiet", "view"):
            options = ("-q",) if kind == "quiet" else ()
            before = set(ProjectDirectory(project).run_ids())
            spent = project / "spent"
            spent.unlink(missing_ok=True)
            timed = [sys.executable, "-c", SPENT, str(spent), str(CSDCTL), *options, *TRAIN]
            tmux.run("new-session", "-d", *SIZE, "-c", str(project), *timed)
            assert eventually(spent.exists), tmux.screen()
            (run_id,) = set(ProjectDirectory(project).run_ids()) - before
            run = ProjectDirectory(project).find_run(run_id)
            rates[kind].append(samples_per_s(run, 0.0, time.time()))
            used[kind].append(json.loads(spent.read_text()))
    ratios = [view / quiet for view, quiet in zip(rates["view"], rates["quiet"], strict=True)]
    print(f"\nlive view: samples/s over those with -q: {_show(ratios)}")
    print(f"CPU of csdctl: {median(used['view']):.2f} s with the view, {median(used['quiet']):.2f} s with -q")


SPENT = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, _, usage = os.wait4(process.pid, 0)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(usage.ru_utime + usage.ru_stime))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""
"""Runs a command and writes its seconds of CPU, with those of the children that it waits for."""


def _show(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} (median of {', '.join(f'{ratio:.3f}' for ratio in ratios)})"
