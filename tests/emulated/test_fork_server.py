"""Commands whose ranks are forked by a process that stays on every machine."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import csdctl, document, emulated, home_of, succeed
from tests.emulated.small_jobs import dense_model, small_job
from tests.emulated.test_features import weights_of
from tests.emulated.training import events_of, kill_rank, nothing_is_left, start_run
from tests.patience import communicate, eventually, wait_for
from tests.unit.worker.process.test_fork_server import find_servers

pytestmark = pytest.mark.emulated

RUN = ("--batch-size", "4", "--max-steps", "6", "--skip-doctor", "--no-rebalance")
JOB = small_job("epochs: 100000, learning_rate: 0.01", ".npz")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    with emulated(tmp_path, 2, {"job.yaml": JOB, "model.py": dense_model(4)}) as directory:
        generator = np.random.default_rng(0)
        for path in (
            directory / "public.npz",
            *(home_of(directory, f"csd{one}") / "private.npz" for one in (0, 1)),
        ):
            np.savez(path, x=generator.random((64, 4), np.float32), y=generator.integers(0, 3, 64))
        yield directory
        csdctl(directory, "clean")


def servers(project: Path) -> dict[str, set[int]]:
    """Return the servers of each machine, which are alone when no rank runs."""
    homes = {"host": project, **{node: home_of(project, node) for node in ("csd0", "csd1")}}
    return {name: find_servers(home) for name, home in homes.items()}


def test_ranks_are_forked_by_servers_that_stay_until_clean(project: Path) -> None:
    alone = document(project, "train", *RUN)
    assert not any(servers(project).values())
    fleet = project / "fleet.yaml"
    fleet.write_text(fleet.read_text() + "fork_server_s: 600\n")
    forked = [document(project, "train", *RUN), document(project, "train", *RUN)]
    first = servers(project)
    assert [len(found) for found in first.values()] == [1, 1, 1]
    expected, *others = weights_of(project, alone, *forked)
    for found in others:
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)

    process, run = start_run(project, "--batch-size", "4", "--skip-doctor", until="EpochEnd")
    kill_rank("csd1")(project, run)
    # csd1 is back, from the same server: within the next group, or the one after it.
    wait_for(lambda: sum(one["rank"] == 2 for one in events_of(run, "Joined")) == 2, process, project)
    process.send_signal(signal.SIGINT)
    communicate(process, project)
    assert nothing_is_left(project, run)
    assert eventually(lambda: servers(project) == first)

    assert "csd0: 1 process ended" in succeed(project, "clean").stdout
    assert eventually(lambda: not any(servers(project).values()))
