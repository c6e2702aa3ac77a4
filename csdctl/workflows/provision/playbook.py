"""Run a playbook of ansible/ and report its progress, task by task and node by node."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import csdctl
from csdctl.documents import parse_json_document
from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.requirements import explain_extra
from csdctl.workflows.provision.bundle import find_program

CALLBACK = "csdctl_lines"
PREFIX = "csdctl "
"""Begins every line of the callback; Ansible's own warnings have no such beginning."""

NUM_KEPT = 40
END_DEADLINE_S = 15.0
"""For Ansible and its SSH clients to end after SIGTERM; then they are killed."""


@dataclass(frozen=True)
class TaskResult:
    """The end of one task on one node."""

    node: str
    task: str
    state: str
    """One of ok, changed, skipped, failed and unreachable."""
    message: str = ""


@dataclass(frozen=True)
class NodeSummary:
    """Number of tasks of a playbook on one node, by result."""

    ok: int
    changed: int
    failed: int
    unreachable: int
    skipped: int


OnTask = Callable[[TaskResult], None]


@dataclass
class PlaybookResult:
    """The summary of every node, and the messages of failed tasks."""

    summaries: dict[str, NodeSummary]
    failures: dict[str, str]


def ansible_directory() -> Path:
    """Return the directory of the collection: in the repository, or installed with csdctl."""
    package = Path(csdctl.__file__).parent
    return next(path for path in (package / "ansible", package.parent / "ansible") if path.is_dir())


def find_ansible() -> str:
    """Return the path of ansible-playbook; raises InputError without one."""
    found = find_program("ansible-playbook")
    if not found:
        raise InputError(
            "`ansible-playbook` is not installed",
            remedy=f"{explain_extra('provision')}; or only send what nodes need: csdctl provision --send",
        )
    return found


def build_command(
    ansible: str, playbook: Path, inventory: Path, values: Mapping[str, object], arguments: Sequence[str]
) -> list[str]:
    """Return the argument list of ansible-playbook; pure."""
    return [
        *(ansible, str(playbook), "--inventory", str(inventory)),
        *("--extra-vars", json.dumps(dict(values), sort_keys=True), *arguments),
    ]


def build_environment(base: Mapping[str, str], collection: Path, num_nodes: int) -> dict[str, str]:
    """Return the environment of ansible-playbook: none of the user's Ansible settings; pure."""
    kept = {name: value for name, value in base.items() if not name.startswith("ANSIBLE_")}
    return kept | {
        "ANSIBLE_CONFIG": str(collection / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(collection / "roles"),
        "ANSIBLE_CALLBACK_PLUGINS": str(collection / "plugins" / "callback"),
        "ANSIBLE_STDOUT_CALLBACK": CALLBACK,
        "ANSIBLE_FORKS": str(max(1, min(num_nodes, 32))),
        "ANSIBLE_NOCOLOR": "1",
        "LC_ALL": "C.UTF-8",
        "PYTHONWARNINGS": "ignore",
    }


def run_playbook(command: Sequence[str], environment: Mapping[str, str], on_task: OnTask) -> PlaybookResult:
    """Run ansible-playbook to its end; ends it with its processes on Ctrl-C.

    Raises CsdctlError when it fails before any node, with its last lines.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout
    result = PlaybookResult({}, {})
    others: list[str] = []
    try:
        for line in process.stdout:
            if line.startswith(PREFIX) and _take(line.removeprefix(PREFIX), result, on_task):
                continue
            if line.strip():
                others = [*others[-NUM_KEPT:], line.rstrip()]
        process.wait()
    except BaseException:
        _end(process)
        raise
    if process.returncode and not result.summaries:
        raise CsdctlError(
            "ansible-playbook failed:\n" + "\n".join(f"  {line}" for line in others[-NUM_KEPT:])
        )
    return result


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C does not wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _take(text: str, result: PlaybookResult, on_task: OnTask) -> bool:
    """Take a line of the callback; return whether it was one, and not a program's own that begins alike."""
    try:
        content = parse_json_document(text, "a line of Ansible's callback")
        if content["event"] == "summary":
            result.summaries |= {
                str(name): NodeSummary(**{key: int(counts[key]) for key in NodeSummary.__annotations__})
                for name, counts in content["nodes"].items()
            }
            return True
        task = TaskResult(*(str(content[key]) for key in ("node", "task", "state", "message")))
    except (InputError, LookupError, TypeError, ValueError, AttributeError):
        return False
    if task.state in ("failed", "unreachable"):
        result.failures[task.node] = f"{task.task}: {task.message}"
    on_task(task)
    return True
