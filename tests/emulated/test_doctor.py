"""`csdctl doctor` on an emulated fleet: real SSH, real sockets, real links, and real faults."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulated.running import csdctl, emulated
from tests.emulated.training import processes
from tests.patience import eventually, scaled

pytestmark = pytest.mark.emulated

NODES = ["csd0", "csd1"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("doctor"), len(NODES), cpu=0.5) as directory:
        yield directory


def examine(project: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `doctor`; return exit code, JSON document, and standard error."""
    done = csdctl(project, "doctor", "--json", *arguments)
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document, done.stderr


def find_check(document: dict[str, Any], machine: str, check: str) -> dict[str, str]:
    [result] = [
        result for result in document["checks"] if (result["machine"], result["check"]) == (machine, check)
    ]
    return dict(result)


def test_emulated_fleet_passes_all_checks_and_sums_over_its_links(project: Path) -> None:
    code, document, stderr = examine(project)
    assert code == 0, stderr
    assert document["schema"] == "csdctl.doctor/1"
    assert document["is_fit"] is True
    assert {check["status"] for check in document["checks"]} == {"ok"}
    assert {check["machine"] for check in document["checks"]} == {"host", "fleet", *NODES}
    assert [find_check(document, node, "link")["found"] for node in NODES] == ["connected"] * len(NODES)
    assert find_check(document, "fleet", "sum")["found"].startswith("3 ranks, a sum of 1 MiB in ")
    assert "emulated" in stderr
    assert "fit to train" in stderr
    assert list((project / ".csdctl" / "scratch").iterdir()) == []


@pytest.mark.thorough
@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("command", "why"), [("rank", "its rank did not start"), ("link", "its link did not connect")]
)
def test_process_that_is_stopped_is_named_in_time_and_nothing_is_left(
    project: Path, tmp_path: Path, command: str, why: str
) -> None:
    stop = f'[ "$CSDCTL_EMULATED_NODE" = csd1 ] && case "$*" in *" {command} "*) kill -STOP $$ ;; esac'
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n{stop}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    fleet = yaml.safe_load((project / "fleet.yaml").read_text())
    fleet["defaults"]["python"] = str(python)
    (project / "stop.yaml").write_text(yaml.safe_dump(fleet))
    code, document, _ = examine(project, "--fleet", "stop.yaml", "--mpi-timeout", str(round(scaled(8))))
    red = [(check["machine"], check["check"]) for check in document["checks"] if check["status"] == "fail"]
    assert (code, red) == (3, [("csd1", "link")])
    assert why in find_check(document, "csd1", "link")["found"]
    assert find_check(document, "csd0", "link")["status"] == "ok"
    assert find_check(document, "fleet", "sum")["found"].startswith("2 ranks, ")
    assert eventually(lambda: not processes(str(python)))
