"""`exec`: a command of the user on all nodes at once, over the connections that every command uses."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.runs.ledger import record_traffic
from csdctl.transport.local import LocalSession
from csdctl.transport.many import Outcome, run_on_nodes
from csdctl.transport.session import Session
from csdctl.workflows.exec.answers import Answer, ExecResult, build_answer, build_result

OnAnswer = Callable[[Outcome[tuple[Answer, float]]], None]


@dataclass(frozen=True)
class ExecOptions:
    """The deadline of the command on each machine, and of each connection, in seconds."""

    timeout_s: float = 60.0
    connect_deadline_s: float = 10.0
    has_host: bool = False
    """Whether it runs on the host too."""

    def __post_init__(self) -> None:
        for name, value in (("timeout", self.timeout_s), ("connect-deadline", self.connect_deadline_s)):
            if not 0 < value <= 7 * 86_400:
                raise InputError(f"--{name} is {value:g}, expected more than 0 s and at most a week")


def run_command(
    fleet: Fleet,
    command: Sequence[str],
    *,
    directory: Path,
    options: ExecOptions = ExecOptions(),
    on_done: OnAnswer = lambda outcome: None,
) -> ExecResult:
    """Run `command` on all nodes of `fleet`, in the login directory; errors of machines are in the result.

    Several arguments are a program and what it gets; one argument is a line for the shell of the machine.
    """
    argv = parse_command(command)

    def visit(session: Session) -> tuple[Answer, float]:
        done = session.run(argv, deadline_s=options.timeout_s, is_users=True)
        return build_answer(done.exit_code, done.stdout, done.stderr), done.duration_s

    host = LocalSession(HOST_NAME, directory) if options.has_host else None
    with contextlib.closing(host) if host else contextlib.nullcontext():
        outcomes = run_on_nodes(
            fleet,
            visit,
            directory=directory,
            connect_deadline_s=options.connect_deadline_s,
            on_done=on_done,
            on_traffic=record_traffic(directory, "exec"),
            host=host,
        )
    machines = fleet.machines if host else fleet.machines[1:]
    return build_result(fleet, machines, outcomes)


def parse_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the argument list of what the user wrote after `--`; raises InputError for nothing."""
    if not command or not command[0].strip():
        raise InputError(
            "no command to run", remedy="write it after `--`: csdctl exec -- df -h, or give a --task"
        )
    return ("sh", "-c", command[0]) if len(command) == 1 and _is_shell_line(command[0]) else tuple(command)


def _is_shell_line(text: str) -> bool:
    """Whether one argument is more than the name of a program."""
    return any(character.isspace() or character in "|&;<>()$`*?[]{}~\"'" for character in text)
