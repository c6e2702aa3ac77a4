"""What the shell completes, asked as the shells ask it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = {
    "bash": (
        'eval "$(csdctl --show-completion; true)"; COMP_WORDS=(csdctl train --strategy f); COMP_CWORD=3; '
        "_csdctl_completion csdctl; echo ${COMPREPLY[*]}"
    ),
    "zsh": (
        # zsh completes only in a terminal: the function gets what it would get there and prints its result.
        "compdef() {}; _arguments() { print -r -- $* }; _describe() { print -r -- $* }; "
        'eval "$(csdctl --show-completion; true)"; words=(csdctl train --strategy f); CURRENT=4; '
        "_csdctl_completion"
    ),
    "fish": "csdctl --show-completion | source; complete -C 'csdctl train --strategy f'",
}


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
    words = ["csdctl", *line.split()]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert complete(project, "complete_bash", asked) == expected


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in SHELLS])
def test_shell_completes_with_the_script_that_is_shown(shell: str, tmp_path: Path) -> None:
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", SHELLS[shell]],
        env={"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "features" in done.stdout, done.stderr


def complete(project: Path, instruction: str, asked: dict[str, str]) -> list[str]:
    """Return what csdctl offers to a shell that asks with these variables."""
    done = subprocess.run(
        [str(Path(sys.prefix) / "bin" / "csdctl")],
        env={**os.environ, "_CSDCTL_COMPLETE": instruction, **asked},
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()
