"""The command line as a program: exit codes, messages, and what a command loads."""

import errno
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import typer

from csdctl import errors
from csdctl.cli.app import app, run_command, take_global_options
from csdctl.cli.call import retry_line
from csdctl.errors import ExitCode
from csdctl.terminal.streams import Streams
from docs.generate import list_commands

LONG = ("csdctl train", "csdctl tune")
"""Commands whose help is longer than a screen."""
SCREEN = (40, 80)
"""Lines and columns."""
HEAVY = ("asyncssh", "keras", "numpy", "paramiko", "pydantic", "tensorflow")


def run(*arguments: str, is_debugging: bool = False) -> tuple[int, str]:
    """Run one command line and return its exit code and what it wrote to its stderr."""
    stderr = StringIO()
    code = run_command(arguments, Streams(stderr=stderr, is_debugging=is_debugging))
    return code, stderr.getvalue()


def test_error_is_a_message_with_a_remedy_and_an_exit_code() -> None:
    code, stderr = run("discover", "--dry-run")
    assert code == ExitCode.BAD_INPUT
    assert stderr.startswith("error: --dry-run and --force apply only when the fleet file is written")
    assert "  → add the source to write it from" in stderr
    assert "Traceback" not in stderr
    assert "Traceback" in run("discover", "--dry-run", is_debugging=True)[1]


def run_failing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, *arguments: str
) -> tuple[int, str, str]:
    """Return the exit code of a command that fails with `error`, its stdout and its stderr."""

    def fail(directory: object) -> None:
        raise error

    monkeypatch.setattr("csdctl.cli.app.check_private", fail)
    stdout, stderr = StringIO(), StringIO()
    code = run_command(["report", *arguments], Streams(stdout, stderr))
    return code, stdout.getvalue(), stderr.getvalue()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CsdctlError("x"), 1),
        (errors.InputError("x"), 2),
        (errors.UnreachableError("x"), 4),
        (errors.HostKeyError("x"), 4),
        (errors.NoNodeReachableError("x"), 4),
        (errors.DeadlineError("x"), 5),
        (errors.RunError("x"), 1),
        (OSError(errno.ENOSPC, "No space left"), 1),
        (OSError(errno.EROFS, "Read-only file system"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), 2),
        (BrokenPipeError(), 1),
        (RuntimeError("x"), 1),
        (typer.Abort(), 130),
        (typer.Exit(3), 3),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    assert run_failing(monkeypatch, error)[0] == code


@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("number", "what"),
    [
        (errno.ENOSPC, "cannot write {}: no space left on device\n  → free space on {},"),
        (errno.EROFS, "cannot write {}: read-only file system\n  → mount {} read-write"),
        (errno.EACCES, "cannot access {}: permission denied\n  → fix the permissions"),
    ],
)
def test_error_of_a_disk_names_file_and_disk_and_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, what: str
) -> None:
    path, disk = tmp_path / "missing" / "file", next(filter(os.path.ismount, tmp_path.parents))
    _, _, stderr = run_failing(monkeypatch, OSError(number, os.strerror(number), str(path)))
    assert stderr.startswith(f"error: {what.format(path, disk)}")
    assert "then repeat the command: files that it has not finished are as before" in stderr


def test_error_names_its_node_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.UnreachableError("is down", node="csd1", remedy="switch it on")
    code, stdout, stderr = run_failing(monkeypatch, error, "--json")
    assert stderr == "error: csd1: is down\n  → switch it on\n"
    assert json.loads(stdout) == {
        "schema": "csdctl.error/1",
        "node": "csd1",
        "message": "is down",
        "remedy": "switch it on",
        "exit_code": code,
    }


def test_json_belongs_to_this_program_alone_and_is_written_for_an_unknown_option_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout = StringIO()
    run_command(["train", "--json", "--no-such-option"], Streams(stdout, StringIO()))
    assert "--no-such-option" in json.loads(stdout.getvalue())["message"]
    assert run_failing(monkeypatch, errors.InputError("x"), "--", "--json")[1] == ""


class TestGlobalOptions:
    @pytest.mark.parametrize("arguments", [["-h"], ["train", "-h"], ["runs", "list", "-h"], ["-V"]])
    def test_short_forms(self, arguments: list[str]) -> None:
        assert run(*arguments)[0] == ExitCode.DONE

    def test_what_follows_two_dashes_belongs_to_another_program(self) -> None:
        given = ["exec", "-v", "--", "ls", "-v"]
        assert take_global_options(given) == ["exec", "--", "ls", "-v"]

    def test_quiet_prints_results_alone(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "csdctl", "runs", "list"]
        said = [
            subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            for more in ([], ["-q"])
        ]
        assert ("no runs yet" in said[0], said[1]) == (True, "")


def test_help_loads_nothing_heavy() -> None:
    """The list of commands loads nothing of HEAVY. For options, typer itself loads pydantic."""
    program = (
        "import sys\n"
        "from csdctl.cli.app import COMMANDS, run_command\n"
        "from csdctl.terminal.streams import Streams\n"
        "for names in [''], [name for section in COMMANDS.values() for name in section]:\n"
        "    assert not any(run_command([*name.split(), '--help'], Streams()) for name in names)\n"
        f"    print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    of_list, of_commands = done.stderr.splitlines()
    assert of_list == ""
    assert of_commands in ("", "pydantic")


def test_help_of_every_command_fits_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    long = {}
    for name, _ in list_commands(app):
        assert run_command([*name.split()[1:], "--help"], Streams()) == ExitCode.DONE
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= SCREEN[1], name
        if len(lines) > SCREEN[0]:
            long[name] = len(lines)
    assert set(long) <= set(LONG), long


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("clean --fleet lab.yaml --dry-run --limit=a,b", "clean --fleet lab.yaml --dry-run --failed-from X"),
        (
            "exec --failed-from old.json --timeout 5 -- df --limit",
            "exec --timeout 5 --failed-from X -- df --limit",
        ),
    ],
)
def test_command_to_retry_is_the_one_that_failed(typed: str, again: str) -> None:
    assert retry_line(typed.split()) == "csdctl " + again.replace("X", ".csdctl/failed.json")


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
