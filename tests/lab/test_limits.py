"""Limits of machines and faults of links are named with node, value and cost, by doctor and by a run."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.machines import LabNode
from tests.lab.project import Project
from tests.lab.test_main_job import NETWORK

pytestmark = pytest.mark.lab

TRAIN = ("--batch-size", "8", "--skip-doctor")


@contextmanager
def node_with(project: Project, start_up: str) -> Iterator[LabNode]:
    """A fleet of one node with this start-up file."""
    with project.lab.node("limited", 48, start_up=start_up + "\n") as node:
        project.use(node, network=NETWORK)
        yield node


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("start_up", "named", "expected"),
    [
        ("ulimit -n 20", "open files 20 (`ulimit -n`)", "32"),
        ("ulimit -v 300000", "address space 300000 (`ulimit -v`)", r"\d{7}"),
        ("ulimit -f 8", "file size 8 (`ulimit -f`)", "4096"),
        ("ulimit -d 100000", "data size 100000 (`ulimit -d`)", r"\d{6}"),
        ("ulimit -u 5", "processes 5 (`ulimit -u` or pids.max)", r"\d\d"),
    ],
)
def test_low_limit_of_a_node_is_named_by_doctor_and_by_the_error_of_a_run(
    project: Project, job: Path, start_up: str, named: str, expected: str
) -> None:
    with node_with(project, start_up):
        examined = project.csdctl("doctor")
        trained = project.csdctl("train", str(job), *TRAIN)
    assert examined.returncode == trained.returncode == 1
    pattern = re.escape(named) + rf" \(expected {expected}\)"
    assert re.search(f"red: limited: limits: {pattern}", examined.stdout)
    assert re.search(f"probably because of this, on limited: limits: {pattern}", trained.stderr)
    assert "/etc/security/limits.conf" in trained.stderr


def test_limits_that_suffice_and_low_soft_limits_stop_nothing_and_mpirun_says_nothing(
    project: Project, job: Path
) -> None:
    """The lab's interfaces have IPv6 addresses, too."""
    with node_with(project, "ulimit -Sn 16; ulimit -Sf 8; ulimit -Sv 90000; ulimit -Hn 32"):
        assert "fit to train" in (examined := project.csdctl("doctor")).stdout, examined.stdout
        trained = project.csdctl("train", str(job), *TRAIN)
    assert trained.returncode == 0, trained.stderr
    assert not [
        log for log in project.path.glob(".csdctl/runs/*/logs/rank-*.log") if "link: " in log.read_text()
    ]
