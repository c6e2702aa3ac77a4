"""`csdctl clean` and `--failed-from` on an emulated fleet, with real processes and files."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.emulation.fleet import EmulatedSpec, start_fleet, stop_fleet
from csdctl.fleet.fleet_file import load_fleet
from csdctl.transport.many import open_sessions
from tests.emulated.running import csdctl
from tests.patience import eventually

pytestmark = pytest.mark.emulated

RUN = f"20260101-000000-{os.getpid() % 1_000_000:06}"
"""Of this process alone: other tests may run on the same machine, and `num_running` counts theirs, too."""
LEAVE_A_RANK = (
    "rm -f ~/left; "
    f"setsid sh -c 'echo $$ >~/left; sleep 100000; true' csdctl-run={RUN}/csd0 >/dev/null 2>&1 </dev/null & "
    "until [ -s ~/left ]; do sleep 0.05; done; cat ~/left"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with an emulated fleet, and broken.yaml in which the port of csd1 is closed."""
    directory = tmp_path_factory.mktemp("project")
    emulated = directory / ".csdctl" / "emulated"
    written = start_fleet(
        emulated,
        EmulatedSpec(2, 0.5, 1 << 30),
        fleet_path=directory / "fleet.yaml",
        cpu_mechanism="duty",
        owner_pid=os.getpid(),
    )
    text = written.read_text()
    (directory / "broken.yaml").write_text(
        text.replace(f"port: {load_fleet(written).node('csd1').port}", "port: 1")
    )
    yield directory
    stop_fleet(emulated)


def on_csd0(project: Path, script: str) -> str:
    with open_sessions(load_fleet(project / "fleet.yaml"), directory=project) as sessions:
        return sessions.nodes["csd0"].run(["sh", "-c", script]).check("csd0", doing="a script").output


def num_running(project: Path) -> int:
    """Return the number of running processes of the run."""
    script = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^csdctl-run={RUN}'; true"
    return int(on_csd0(project, script))


@pytest.mark.fault(24)
def test_process_of_an_earlier_run_is_ended_and_its_run_named(project: Path) -> None:
    on_csd0(project, LEAVE_A_RANK)
    listed = csdctl(project, "clean", "--dry-run")
    assert f"csd0: 1 processes of run {RUN} are still running" in listed.stdout
    assert num_running(project) == 1
    done = csdctl(project, "clean")
    assert done.returncode == 0, done.stderr
    assert f"csd0: 1 processes of run {RUN} ended" in done.stdout
    assert "csd1: nothing left" in done.stdout
    assert eventually(lambda: num_running(project) == 0)  # a killed process may take a moment to end


def test_process_that_only_resembles_csdctl_is_not_ended(project: Path) -> None:
    elsewhere = LEAVE_A_RANK.replace("setsid", "cd / && setsid")
    pid = int(on_csd0(project, elsewhere))
    assert "csd0: nothing left" in csdctl(project, "clean").stdout
    on_csd0(project, f"kill -KILL -{pid}")


def test_partial_files_are_removed_and_complete_files_stay(project: Path) -> None:
    on_csd0(
        project, "mkdir -p .csdctl/objects && cd .csdctl/objects && echo 1 >0123.npy && echo 2 >89ab.npy.part"
    )
    assert "csd0: 1 paths (2 B) removed" in csdctl(project, "clean").stdout
    assert on_csd0(project, "ls .csdctl/objects").split() == ["0123.npy"]


@pytest.mark.thorough
def test_features_and_predictions_are_listed_and_removed_on_request(project: Path) -> None:
    on_csd0(
        project,
        "mkdir -p .csdctl/features/a .csdctl/predictions/b .csdctl/data && "
        "echo 123 >.csdctl/features/a/images.npy && echo 1 >.csdctl/predictions/b/images.npy && "
        "echo 1 >.csdctl/data/x",
    )
    (project / ".csdctl" / "features" / "c").mkdir(parents=True)
    (project / ".csdctl" / "features" / "c" / "images.npy").write_bytes(bytes(3000))
    listed = csdctl(project, "clean")
    assert "csd0: nothing left; stored: features 4 B, predictions 2 B (--computed" in listed.stdout
    assert "host: nothing left; stored: features 2.9 KiB (--computed" in listed.stdout
    assert "csd1: nothing left\n" in listed.stdout
    would = csdctl(project, "clean", "--computed", "--dry-run")
    assert "csd0: 2 paths (6 B) could be removed" in would.stdout
    done = csdctl(project, "clean", "--computed")
    assert "csd0: 2 paths (6 B) removed" in done.stdout, done.stderr
    assert on_csd0(project, "ls .csdctl/data; ls -d .csdctl/features .csdctl/predictions; true").split() == [
        "x"
    ]
    assert not (project / ".csdctl" / "features").exists()
    on_csd0(project, "rm -r .csdctl/data")


@pytest.mark.thorough
def test_deployed_trees_stay_until_nothing_uses_them(project: Path) -> None:
    (project / "tree").mkdir()
    (project / "tree" / "file").write_text("content")
    assert csdctl(project, "clean", "--unused").returncode == 0
    assert csdctl(project, "deploy", "--tree", "tree").returncode == 0
    assert "csd0: nothing left" in csdctl(project, "clean", "--unused").stdout
    assert on_csd0(project, "cat tree/file") == "content"
    on_csd0(project, "rm tree")
    assert "unused files removed" in csdctl(project, "clean", "--unused").stdout
    assert on_csd0(project, "ls .csdctl/objects") == ""


@pytest.mark.thorough
def test_everything_is_removed_with_the_trees(project: Path) -> None:
    assert csdctl(project, "deploy", "--tree", "tree").returncode == 0
    assert csdctl(project, "clean", "--everything", "--yes").returncode == 0
    assert on_csd0(project, "ls -d tree .csdctl 2>/dev/null; true") == "", "no dangling link remains"


@pytest.mark.thorough
def test_everything_is_removed_only_when_confirmed(project: Path) -> None:
    on_csd0(project, "mkdir -p .csdctl/data && echo 1 >.csdctl/data/x")
    refused = csdctl(project, "clean", "--everything")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert "data" in on_csd0(project, "ls .csdctl")
    assert csdctl(project, "clean", "--everything", "--yes").returncode == 0
    assert on_csd0(project, "ls -d .csdctl 2>/dev/null; true") == ""
    assert (project / ".csdctl" / "emulated").is_dir(), "the host's own directory stays"


@pytest.mark.fault(1)
def test_failed_node_is_named_and_only_it_is_retried(project: Path) -> None:
    failed = csdctl(project, "clean", "--fleet", "broken.yaml")
    assert failed.returncode == 3
    assert "csd0: nothing left" in failed.stdout
    assert "csdctl clean --failed-from .csdctl/failed.json" in failed.stderr
    again = csdctl(project, "clean", "--failed-from", ".csdctl/failed.json", "--json")
    assert again.returncode == 0, again.stderr
    assert list(json.loads(again.stdout)["machines"]) == ["host", "csd1"]
    assert not (project / ".csdctl" / "failed.json").exists(), "nothing is left to retry"


@pytest.mark.thorough
def test_json_output_of_a_command_serves_as_failed_from(project: Path) -> None:
    failed = csdctl(project, "clean", "--fleet", "broken.yaml", "--json")
    (project / "out.json").write_text(failed.stdout)
    again = csdctl(project, "clean", "--failed-from", "out.json", "--json")
    assert list(json.loads(again.stdout)["machines"]) == ["host", "csd1"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "content", ["{}", '{"failed": {}}', '{"failed": {"host": {}}}', "[]", '{"failed": 3}']
)
def test_file_without_failed_nodes_is_bad_input(project: Path, content: str) -> None:
    (project / "none.json").write_text(content)
    done = csdctl(project, "clean", "--failed-from", "none.json")
    assert done.returncode == 2
    assert "none.json" in done.stderr


@pytest.mark.thorough
@pytest.mark.fault(34)
def test_clean_does_not_end_a_running_csdctl_unless_forced(project: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from csdctl.fleet.fleet_file import load_fleet\n"
        "from csdctl.workflows.workspace.workspace import open_workspace\n"
        "fleet = load_fleet(Path('fleet.yaml'))\n"
        "with open_workspace(Path.cwd(), fleet, 'train', is_locking=True):\n"
        "    print('working', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "working\n"
        refused = csdctl(project, "clean")
        assert refused.returncode == 1
        assert f"another csdctl is running here: `csdctl train`, process {worker.pid} on" in refused.stdout
        assert csdctl(project, "clean", "--force").returncode == 0
        assert "nothing left" in csdctl(project, "clean").stdout, "the lock is free now"
        worker.kill()
