"""A session that answers from a script: for trying workflows without any machine.

    fake = FakeSession("csd0").on("uname", stdout="aarch64\\n").on("rm", exit_code=1, stderr="no such file")
    fake.on("python3", replies=lambda line: [line.upper()])      # for `converse`

It keeps what it was asked in `commands`, and what it was sent in `stdins` and in its conversations.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from csdctl.errors import CsdctlError, DeadlineError, InputError
from csdctl.transport.meter import Meter
from csdctl.transport.session import MAX_OUTPUT_BYTES, Completed

Replies = Callable[[str], Iterable[str]]


@dataclass(frozen=True)
class Answer:
    """What a command beginning with `prefix` answers."""

    prefix: tuple[str, ...]
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    error: CsdctlError | None = None
    replies: Replies = lambda line: ()


class FakeSession:
    """Implements `session.Session` from scripted answers; an unscripted command ends with 127."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.host_key_fingerprint = ""
        self.meter = Meter()
        self.commands: list[tuple[str, ...]] = []
        self.stdins: list[bytes] = []
        self.conversations: list[FakeConversation] = []
        self.is_closed = False
        self._answers: list[Answer] = []

    def on(
        self,
        *prefix: str,
        stdout: str | bytes = b"",
        stderr: str | bytes = b"",
        exit_code: int = 0,
        error: CsdctlError | None = None,
        replies: Replies = lambda line: (),
    ) -> "FakeSession":
        """Answer commands that begin with `prefix`; the longest prefix wins, then the latest."""
        answer = Answer(prefix, _as_bytes(stdout), _as_bytes(stderr), exit_code, error, replies)
        self._answers.insert(0, answer)
        return self

    def run(self, command: Sequence[str], *, stdin: bytes = b"", deadline_s: float = 60.0) -> Completed:
        """The scripted answer; raises its error."""
        answer = self._answer(command)
        self.stdins.append(stdin)
        if answer.error:
            raise answer.error
        stdout, stderr = answer.stdout[:MAX_OUTPUT_BYTES], answer.stderr[-MAX_OUTPUT_BYTES:]
        return Completed(tuple(command), answer.exit_code, stdout, stderr, 0.0)

    def converse(self, command: Sequence[str]) -> "FakeConversation":
        """A conversation with the scripted replies, after `stdout` as its first lines."""
        answer = self._answer(command)
        if answer.error:
            raise answer.error
        conversation = FakeConversation(self.name, tuple(command), answer)
        self.conversations.append(conversation)
        return conversation

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True

    def _answer(self, command: Sequence[str]) -> Answer:
        asked = tuple(command)
        if not asked:
            raise InputError("not a command: []")
        self.commands.append(asked)
        fitting = [answer for answer in self._answers if asked[: len(answer.prefix)] == answer.prefix]
        missing = Answer(asked, stderr=f"{asked[0]}: not found\n".encode(), exit_code=127)
        return max(fitting, key=lambda answer: len(answer.prefix), default=missing)


class FakeConversation:
    """Implements `session.Conversation`: each sent line gives the lines of `replies`."""

    def __init__(self, name: str, command: tuple[str, ...], answer: Answer) -> None:
        self.sent: list[str] = []
        self.sent_bytes = b""
        self.is_closed = False
        self._name = name
        self._command = command
        self._answer = answer
        self._lines = deque(answer.stdout.decode(errors="replace").splitlines())
        self._has_ended = answer.exit_code != 0

    def send_line(self, line: str) -> None:
        """Take one line; raises EOFError when the command has ended."""
        if self._has_ended or self.is_closed:
            raise EOFError(f"`{self._command[0]}` on {self._name} has ended")
        self.sent.append(line)
        self._lines += self._answer.replies(line)

    def send_bytes(self, data: bytes) -> None:
        """Keep `data` in `sent_bytes`; raises EOFError when the command has ended."""
        if self._has_ended or self.is_closed:
            raise EOFError(f"`{self._command[0]}` on {self._name} has ended")
        self.sent_bytes += data

    def read_line(self, *, deadline_s: float) -> str:
        """The next scripted line; raises DeadlineError, or EOFError after the end."""
        if self._lines:
            return self._lines.popleft()
        if self._has_ended or self.is_closed:
            raise EOFError(f"`{self._command[0]}` on {self._name} has ended")
        raise DeadlineError(f"`{self._command[0]}` did not answer within {deadline_s:g} s", node=self._name)

    def wait(self, *, deadline_s: float) -> Completed:
        """The scripted end."""
        self._has_ended = True
        return Completed(self._command, self._answer.exit_code, b"", self._answer.stderr, 0.0)

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
