"""What machines answered to the same command or task, and which of them answered the same; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from csdctl.errors import CsdctlError, RemoteCommandError
from csdctl.fleet.model import Fleet
from csdctl.transport.many import Outcome
from csdctl.transport.session import bounded, last_line

MAX_KEPT_BYTES = 64 * 1024
"""Of each output of each machine: a hundred machines that print megabytes must not fill the host's memory."""


@dataclass(frozen=True)
class Answer:
    """What one machine printed, and its exit code; `error` is what a task raised."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    num_dropped: int = 0
    """Bytes that were not kept: the end of standard output and the beginning of standard error."""
    error: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether the command or the task failed."""
        return self.exit_code != 0 or bool(self.error)

    def as_error(self, name: str) -> CsdctlError:
        """Return a failed answer as the error of machine `name`."""
        cause = self.error or bounded(last_line(self.stderr)) or "no message on standard error"
        return RemoteCommandError(f"exit code {self.exit_code}: {cause}", node=name)


def build_answer(exit_code: int, stdout: bytes, stderr: bytes, error: str = "") -> Answer:
    """Return an answer with outputs of at most MAX_KEPT_BYTES each."""
    kept, kept_errors = stdout[:MAX_KEPT_BYTES], stderr[-MAX_KEPT_BYTES:]
    num_dropped = len(stdout) - len(kept) + len(stderr) - len(kept_errors)
    return Answer(exit_code, kept, kept_errors, num_dropped, error)


@dataclass(frozen=True)
class ExecResult:
    """The answers of the machines that answered, and why the others did not."""

    fleet: Fleet
    answers: dict[str, Answer]
    unanswered: dict[str, CsdctlError]
    machines: tuple[str, ...]
    durations_s: dict[str, float]

    @property
    def rows(self) -> list[tuple[Answer, list[str]]]:
        """Each different answer with the machines that gave it, in the order of their first machines."""
        return fold_answers(self.answers)

    @property
    def failed(self) -> dict[str, CsdctlError]:
        """The error of every machine that did not answer, or whose command failed."""
        failed = {name: answer.as_error(name) for name, answer in self.answers.items() if answer.has_failed}
        return {
            name: {**failed, **self.unanswered}[name]
            for name in self.machines
            if name in failed or name in self.unanswered
        }


def fold_answers(answers: Mapping[str, Answer]) -> list[tuple[Answer, list[str]]]:
    """Return each different answer once, with the names of the machines that gave it."""
    names: dict[Answer, list[str]] = {}
    for name, answer in answers.items():
        names.setdefault(answer, []).append(name)
    return list(names.items())


def build_result(
    fleet: Fleet, machines: Iterable[str], outcomes: Mapping[str, Outcome[tuple[Answer, float]]]
) -> ExecResult:
    """Return the result of `outcomes`: an answer and its duration in seconds for each machine."""
    answered = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
    return ExecResult(
        fleet,
        {name: answer for name, (answer, _) in answered.items()},
        {name: outcome.error for name, outcome in outcomes.items() if outcome.error},
        tuple(machines),
        {name: duration_s for name, (_, duration_s) in answered.items()},
    )
