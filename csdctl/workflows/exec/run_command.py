"""`exec`: a command of the user on all nodes at once, over the connections that every command uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from csdctl.errors import CsdctlError, InputError, RemoteCommandError
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import names_by_value
from csdctl.runs.ledger import record_traffic
from csdctl.transport.many import Outcome, errors_of, run_on_nodes
from csdctl.transport.session import Session, bounded, last_line

MAX_KEPT_BYTES = 64 * 1024
"""Kept of each output of each machine: the answers of a hundred machines are in memory together."""


@dataclass(frozen=True)
class Answer:
    """The output and exit code of one machine. `error`: why a task failed, or ''."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    num_dropped: int = 0
    """Bytes that were not kept: the end of standard output and the beginning of standard error."""
    error: str = ""
    duration_s: float = field(default=0.0, compare=False)

    @property
    def has_failed(self) -> bool:
        """Whether the command or the task failed."""
        return self.exit_code != 0 or bool(self.error)

    def as_error(self, name: str) -> CsdctlError:
        """Return a failed answer as the error of machine `name`."""
        cause = self.error or bounded(last_line(self.stderr)) or "no message on standard error"
        return RemoteCommandError(f"exit code {self.exit_code}: {cause}", node=name)


def build_answer(
    exit_code: int, stdout: bytes, stderr: bytes, error: str = "", duration_s: float = 0.0
) -> Answer:
    """Return an answer with at most MAX_KEPT_BYTES of each output."""
    kept, kept_errors = stdout[:MAX_KEPT_BYTES], stderr[-MAX_KEPT_BYTES:]
    num_dropped = len(stdout) - len(kept) + len(stderr) - len(kept_errors)
    return Answer(exit_code, kept, kept_errors, num_dropped, error=error, duration_s=duration_s)


@dataclass(frozen=True)
class ExecResult:
    """The answers of the machines that answered, and why the others did not."""

    fleet: Fleet
    outcomes: Mapping[str, Outcome[Answer]]
    """By machine: the host first, if it was asked, then the nodes in the order of the fleet."""

    @property
    def answers(self) -> dict[str, Answer]:
        """The answers of the machines that answered."""
        return {name: outcome.value for name, outcome in self.outcomes.items() if outcome.value}

    @property
    def rows(self) -> list[tuple[Answer, list[str]]]:
        """The distinct answers with the machines that gave them, in the order of their first machines."""
        return list(names_by_value(self.answers.items()).items())

    @property
    def failed(self) -> dict[str, CsdctlError]:
        """The error of every machine that did not answer, or whose command failed."""
        failed = {name: answer.as_error(name) for name, answer in self.answers.items() if answer.has_failed}
        errors = errors_of(self.outcomes) | failed
        return {name: errors[name] for name in self.outcomes if name in errors}


@dataclass(frozen=True)
class ExecOptions:
    """The deadline of the command on each machine, and of each connection, in seconds."""

    timeout_s: float = 60.0
    connect_deadline_s: float = 10.0
    has_host: bool = False


def run_command(
    fleet: Fleet,
    command: Sequence[str],
    *,
    directory: Path,
    options: ExecOptions = ExecOptions(),
    on_done: Callable[[Outcome[Answer]], None] = lambda outcome: None,
) -> ExecResult:
    """Run a program, or one argument as a shell line, on all nodes. Errors are in the result."""
    argv = parse_command(command)

    def visit(session: Session) -> Answer:
        done = session.run(argv, deadline_s=options.timeout_s, is_users=True)
        return build_answer(done.exit_code, done.stdout, done.stderr, duration_s=done.duration_s)

    outcomes = run_on_nodes(
        fleet,
        visit,
        directory=directory,
        connect_deadline_s=options.connect_deadline_s,
        on_done=on_done,
        on_traffic=record_traffic(directory, "exec"),
        has_host=options.has_host,
    )
    return ExecResult(fleet, outcomes)


def parse_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the argument list of what the user wrote after `--`. Raises InputError for nothing."""
    if not command or not command[0].strip():
        remedy = "write it after `--`: csdctl exec -- df -h, or use --task"
        raise InputError("no command to run", remedy=remedy)
    is_line = any(character.isspace() or character in "|&;<>()$`*?[]{}~\"'" for character in command[0])
    return ("sh", "-c", command[0]) if len(command) == 1 and is_line else tuple(command)
