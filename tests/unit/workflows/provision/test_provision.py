"""The output of Ansible's callback as results, and what a node that failed is told to do."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from csdctl.errors import CsdctlError
from csdctl.workflows.provision import provision as playbook
from csdctl.workflows.provision.provision import (
    NodeSummary,
    PlaybookResult,
    TaskResult,
    ansible_directory,
    build_environment,
    run_playbook,
)
from tests.patience import eventually
from tests.unit.transport.test_session_contract import is_alive

TASK = {
    "event": "task",
    "node": "csd0",
    "task": "Install the wheels",
    "state": "failed",
    "message": "no space",
}
COUNTS = {"ok": 3, "changed": 1, "failed": 1, "unreachable": 0, "skipped": 2}


def program(*lines: object, code: int = 0) -> list[str]:
    text = "\n".join(f"csdctl {json.dumps(line)}" if isinstance(line, dict) else str(line) for line in lines)
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"]


def test_tasks_and_summary_are_reported() -> None:
    seen: list[TaskResult] = []
    lines = (
        "[WARNING]: something",
        "csdctl of a module's own",
        'csdctl {"event": 5}',
        TASK,
        {"event": "summary", "nodes": {"csd0": COUNTS}},
    )
    result = run_playbook(program(*lines, code=2), {}, seen.append)
    assert [task.task for task in seen] == ["Install the wheels"]
    assert result.summaries == {"csd0": NodeSummary(**COUNTS)}
    assert result.failures == {"csd0": "Install the wheels: no space"}


@pytest.mark.parametrize("ignores", ["both", "fork"])
def test_program_and_its_forks_that_ignore_the_end_are_killed(
    ignores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playbook, "END_DEADLINE_S", 0.1)
    task = json.dumps(TASK | {"message": "PIDS"})
    lasting = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "fork = os.fork()\n"
        f"if fork and {ignores!r} == 'fork': signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        f"if fork: print('csdctl', {task!r}.replace('PIDS', f'{{os.getpid()}} {{fork}}'), flush=True)\n"
        "time.sleep(600)\n"
    )
    seen: list[int] = []

    def interrupt(task: TaskResult) -> None:
        seen.extend(int(pid) for pid in task.message.split())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_playbook([sys.executable, "-c", lasting], {}, interrupt)
    assert len(seen) == 2
    assert eventually(lambda: not any(is_alive(pid) for pid in seen))


def test_failure_before_any_node_has_ansibles_own_words() -> None:
    with pytest.raises(CsdctlError, match="ERROR! the role was not found"):
        run_playbook(program("ERROR! the role was not found", code=4), {}, lambda task: None)


def test_settings_of_the_user_do_not_reach_ansible(tmp_path: Path) -> None:
    environment = build_environment({"ANSIBLE_HOST_KEY_CHECKING": "0", "PATH": "/bin"}, tmp_path, 100)
    assert "ANSIBLE_HOST_KEY_CHECKING" not in environment
    assert (environment["PATH"], environment["ANSIBLE_FORKS"]) == ("/bin", "32")


def test_every_default_of_a_role_is_specified() -> None:
    for role in ("host", "node"):
        directory = ansible_directory() / "roles" / role
        defaults = yaml.safe_load((directory / "defaults/main.yml").read_text())
        specified = yaml.safe_load((directory / "meta/argument_specs.yml").read_text())
        options = specified["argument_specs"]["main"]["options"]
        assert {name: options[name]["default"] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("Install the wheels: ERROR: [Errno 28] No space left on device", "df -h"),
        ("Look for a Python: Task failed: Missing sudo password", "sudo without a password"),
        ("Check MPI: it crashed", "fix it"),
    ],
)
def test_failed_task_has_a_remedy_for_its_cause(message: str, remedy: str) -> None:
    outcome = PlaybookResult({"csd0": NodeSummary(**COUNTS)}, {"csd0": message}).judge("csd0")
    assert outcome.error
    assert outcome.error.message == message
    assert remedy in outcome.error.remedy
