"""`csdctl doctor` on an emulated fleet: real SSH, real sockets, a real mpirun, and real faults."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.emulated.running import CSDCTL, csdctl, emulated, refuse
from tests.emulated.training import processes
from tests.patience import eventually, run_command, scaled

pytestmark = pytest.mark.emulated

EXAMPLE = Path(__file__).parents[2] / "examples" / "fashion_mnist"
SITE = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
NAMESPACE = f"csdctl-doctor-{os.getpid()}"
NODES = ["csd0", "csd1"]
INTERFACES = (
    "link set lo up",
    "link add csdctl0 type veth",  # MPI's daemons need another one; it leads nowhere
    "address add 192.0.2.1/32 dev csdctl0",
    "link set csdctl0 up",
)
FIREWALL = """\
table inet csdctl {
  chain output {
    type filter hook output priority 0
    oifname lo tcp dport 1024-1099 tcp flags & (fin|syn|rst|ack) == syn drop
  }
}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with emulated(tmp_path_factory.mktemp("doctor"), len(NODES), cpu=0.5) as directory:
        yield directory


def fleet_with(
    project: Path, name: str, *, all_nodes: dict[str, object] | None = None, **csd1: object
) -> str:
    """Write a copy of fleet.yaml with changes to all nodes or csd1; return its name."""
    content = yaml.safe_load((project / "fleet.yaml").read_text())
    content["defaults"] |= {"key": str((project / content["defaults"]["key"]).resolve()), **(all_nodes or {})}
    content["nodes"][1] |= csd1
    (project / name).write_text(yaml.safe_dump(content))
    return name


def examine(project: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run `doctor`; return exit code, JSON document, and standard error."""
    done = csdctl(project, "doctor", "--json", *arguments)
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document, done.stderr


def failed_checks(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(check["machine"], check["check"]) for check in document["checks"] if check["status"] == "fail"]


def find_check(document: dict[str, Any], machine: str, check: str) -> dict[str, str]:
    [result] = [
        result for result in document["checks"] if (result["machine"], result["check"]) == (machine, check)
    ]
    return dict(result)


def virtual_environment(path: Path) -> Path:
    """Create a virtual environment with the packages of this one, but without their programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (path / SITE.relative_to(sys.prefix) / "test_packages.pth").write_text(f"{SITE}\n")
    return path


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_emulated_fleet_passes_all_checks_and_the_mpi_check(project: Path) -> None:
    code, document, stderr = examine(project)
    assert code == 0, stderr
    assert document["schema"] == "csdctl.doctor/1"
    assert document["is_fit"] is True
    assert {check["status"] for check in document["checks"]} == {"ok"}
    assert {check["machine"] for check in document["checks"]} == {"host", "fleet", *NODES}
    assert "3 ranks, Open MPI v5.0" in find_check(document, "fleet", "allreduce")["found"]
    assert "emulated" in stderr
    assert "fit to train" in stderr
    assert list((project / ".csdctl" / "scratch").iterdir()) == []


@pytest.mark.thorough
@pytest.mark.fault(56)
@pytest.mark.needs("mounts")
def test_node_with_a_full_tmpdir_fails(project: Path) -> None:
    temporary = (project / ".csdctl/emulated/nodes/csd1/tmp").resolve()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(temporary)], check=True)
    try:
        with pytest.raises(OSError, match="No space left"):
            (temporary / "full").write_bytes(bytes(33 << 20))
        code, document, _ = examine(project)
    finally:
        subprocess.run(["umount", "--lazy", str(temporary)], check=True)
    assert code == 3
    assert failed_checks(document) == [("csd1", "TMPDIR")]
    assert "0 MiB free" in find_check(document, "csd1", "TMPDIR")["found"]


@pytest.mark.thorough
def test_daemon_that_never_responds_is_named_in_time_and_nothing_is_left(
    project: Path, tmp_path: Path
) -> None:
    environment = virtual_environment(tmp_path / "hang")
    prted = Path(sys.prefix) / "bin" / "prted"
    hang = '[ "$CSDCTL_EMULATED_NODE" = csd1 ] && while :; do sleep 0.2; done'
    write_script(environment / "bin" / "prted", f'{hang}\nexec {prted} "$@"')
    fleet = fleet_with(project, "hang.yaml", all_nodes={"python": str(environment / "bin" / "python")})
    deadline_s = round(scaled(8))
    code, document, _ = examine(project, "--fleet", fleet, "--mpi-timeout", str(deadline_s))
    assert code == 1
    assert failed_checks(document) == [("fleet", "allreduce"), ("csd1", "allreduce")]
    found = find_check(document, "fleet", "allreduce")["found"]
    assert f"no rank was started within {deadline_s} s" in found
    assert eventually(lambda: not processes(str(environment)))


@pytest.mark.thorough
@pytest.mark.fault(47)
def test_rank_that_is_stopped_is_named_in_time_and_nothing_is_left(project: Path, tmp_path: Path) -> None:
    stop = '[ "$CSDCTL_EMULATED_NODE" = csd1 ] && case "$*" in *" mpi-check "*) kill -STOP $$ ;; esac'
    python = write_script(tmp_path / "python", f'{stop}\nexec {sys.executable} "$@"')
    fleet = fleet_with(project, "stop.yaml", all_nodes={"python": str(python)})
    deadline_s = round(scaled(8))
    code, document, _ = examine(project, "--fleet", fleet, "--mpi-timeout", str(deadline_s))
    assert code == 1
    assert failed_checks(document) == [("fleet", "allreduce")]
    found = find_check(document, "fleet", "allreduce")["found"]
    assert found == f"csd1 never started a rank within {deadline_s} s"
    assert eventually(lambda: not processes(str(python)))


@pytest.mark.thorough
def test_overall_deadline_ends_doctor_and_shows_partial_results(project: Path, tmp_path: Path) -> None:
    slow = write_script(tmp_path / "python", f'sleep 1000\nexec {sys.executable} "$@"')
    fleet = fleet_with(project, "slow.yaml", python=str(slow))
    code, document, stderr = examine(project, "--fleet", fleet, "--timeout", str(round(scaled(6))))
    assert code == 5, stderr
    assert document["overdue"]
    assert find_check(document, "csd0", "reach")["status"] == "ok"


@pytest.mark.thorough
@pytest.mark.fault(50)
@pytest.mark.needs("firewall")
def test_firewall_between_machines_is_reported_before_anything_hangs(tmp_path: Path) -> None:
    inside = ("ip", "netns", "exec", NAMESPACE)
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        for words in INTERFACES:
            subprocess.run([*inside, "ip", *words.split()], check=True)
        call = [*inside, str(CSDCTL)]
        assert run_command([*call, "emulate", "up", "--nodes", "2"], cwd=tmp_path).returncode == 0
        subprocess.run([*inside, "nft", "-f", "-"], input=FIREWALL, text=True, check=True)
        done = run_command([*call, "doctor", "--json"], cwd=tmp_path)
        run_command([*call, "emulate", "down"], cwd=tmp_path)
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert {check for _, check in failed_checks(document)} == {"ports"}
    assert "timed out" in find_check(document, "host", "ports")["found"]
    assert "firewall" in find_check(document, "host", "ports")["remedy"]
    assert find_check(document, "fleet", "allreduce")["found"].startswith("not tried")


@pytest.mark.fault(50)
def test_network_without_machines_fails_and_nothing_is_started(project: Path) -> None:
    content = yaml.safe_load((project / fleet_with(project, "wrong.yaml")).read_text())
    (project / "wrong.yaml").write_text(yaml.safe_dump(content | {"network": "198.51.100.0/24"}))
    code, document, _ = examine(project, "--fleet", "wrong.yaml")
    assert code == 1
    assert set(failed_checks(document)) == {(name, "network") for name in ("host", *NODES)}
    assert find_check(document, "fleet", "allreduce")["status"] == "warn"


@pytest.mark.fault(49)
def test_training_is_refused_before_anything_is_started(project: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, project, dirs_exist_ok=True)
    python = virtual_environment(tmp_path / "half") / "bin" / "python"
    fleet = fleet_with(project, "refused.yaml", all_nodes={"python": str(python)})
    said = refuse(project, "train", "--fleet", fleet, "--batch-size", "4", code=1)
    assert "the preflight found problems that would make the run fail" in said
    assert "csd1: MPI:" in said
    assert "prted is missing" in said
    assert "--skip-doctor" in said
    assert not (project / ".csdctl" / "runs").exists()
