"""What the shell completes, asked as bash asks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "fleet.yaml").write_text(
        "nodes: [{name: csd0, address: 192.0.2.1}, {name: other, address: 192.0.2.2}]\n"
    )
    (tmp_path / "lab.yaml").write_text("nodes: [{name: csd7, address: 192.0.2.1}]\n")
    for run in ("20250101-a", "20250102-b"):
        (tmp_path / ".csdctl" / "runs" / run).mkdir(parents=True)
    for directory in (".csdctl", ".csdctl/runs"):
        (tmp_path / directory).chmod(0o700)
    (tmp_path / ".csdctl" / "plans").mkdir()
    for name in (".csdctl/plans/job.yaml", "trained.keras"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train --limit c", ["csd0"]),
        ("train --fleet lab.yaml --exclude c", ["csd7"]),
        ("train --fleet none.yaml --limit c", []),
        ("train --resume 2", ["20250102-b", "20250101-a"]),
        ("train --strategy f", ["features"]),
        ("predict t", ["trained.keras"]),
    ],
)
def test_names_of_this_directory_are_completed(project: Path, line: str, expected: list[str]) -> None:
    asked = {"COMP_WORDS": f"csdctl {line}", "COMP_CWORD": str(len(line.split()))}
    done = subprocess.run(
        [str(Path(sys.prefix) / "bin" / "csdctl")],
        env={**os.environ, "_CSDCTL_COMPLETE": "complete_bash", **asked},
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (expected, "")
