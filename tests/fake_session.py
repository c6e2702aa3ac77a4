"""A session with scripted responses, to run workflows without any machine.

    fake = FakeSession("csd0").on("uname", stdout="aarch64\\n").on("rm", exit_code=1, stderr="no such file")
    fake.on("python3", replies=lambda line: [line.upper()])      # for `converse`

It records commands in `commands`, and input in `stdins` and in its conversations.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from csdctl.errors import CsdctlError, DeadlineError, InputError
from csdctl.transport.commands import WrappedCommand
from csdctl.transport.meter import Meter
from csdctl.transport.session import MAX_OUTPUT_BYTES, Completed, Conversation, Deadline, Process, Session

Replies = Callable[[str], Iterable[str]]


@dataclass(frozen=True)
class ScriptedResponse:
    """The response to commands that begin with `prefix`."""

    prefix: tuple[str, ...]
    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    error: CsdctlError | None = None
    replies: Replies = lambda line: ()


class FakeSession(Session):
    """A session with scripted responses; an unscripted command ends with 127."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Meter())
        self.commands: list[tuple[str, ...]] = []
        self.stdins: list[bytes] = []
        self.conversations: list[FakeConversation] = []
        self.is_closed = False
        self._responses: list[ScriptedResponse] = []

    def on(
        self,
        *prefix: str,
        stdout: str | bytes = b"",
        stderr: str | bytes = b"",
        exit_code: int = 0,
        error: CsdctlError | None = None,
        replies: Replies = lambda line: (),
    ) -> "FakeSession":
        """Set the response to commands that begin with `prefix`; the longest prefix wins, then the latest."""
        response = ScriptedResponse(prefix, _as_bytes(stdout), _as_bytes(stderr), exit_code, error, replies)
        self._responses.insert(0, response)
        return self

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        deadline_s: float = 60.0,
        is_users: bool = False,
        needs_state: bool = True,
    ) -> Completed:
        """Return the scripted response; raise its error."""
        response = self._response(command)
        self.stdins.append(stdin)
        if response.error:
            raise response.error
        stdout, stderr = response.stdout[:MAX_OUTPUT_BYTES], response.stderr[-MAX_OUTPUT_BYTES:]
        return Completed(tuple(command), response.exit_code, stdout, stderr, 0.0)

    def converse(self, command: Sequence[str]) -> "FakeConversation":
        """Start a conversation: the lines of `stdout` come first, then the scripted replies."""
        response = self._response(command)
        if response.error:
            raise response.error
        conversation = FakeConversation(self.name, tuple(command), response)
        self.conversations.append(conversation)
        return conversation

    def close(self) -> None:
        """Record the call in `is_closed`."""
        self.is_closed = True

    def _start_process(self, wrapped: WrappedCommand, deadline: Deadline) -> Process:
        raise AssertionError("run and converse start nothing here")

    def _response(self, command: Sequence[str]) -> ScriptedResponse:
        request = tuple(command)
        if not request:
            raise InputError("not a command: []")
        self.commands.append(request)
        matching = [
            response for response in self._responses if request[: len(response.prefix)] == response.prefix
        ]
        missing = ScriptedResponse(request, stderr=f"{request[0]}: not found\n".encode(), exit_code=127)
        return max(matching, key=lambda response: len(response.prefix), default=missing)


class FakeConversation(Conversation):
    """A conversation without a process: each sent line is answered with the lines of `replies`."""

    def __init__(self, name: str, command: tuple[str, ...], response: ScriptedResponse) -> None:
        self.sent: list[str] = []
        self.sent_bytes = b""
        self.is_closed = False
        self._name = name
        self._command = command
        self._response = response
        text = response.stdout.decode(errors="replace")
        self._lines = deque(text.removesuffix("\n").split("\n") if text else ())
        self._has_ended = response.exit_code != 0

    def send_line(self, line: str) -> None:
        """Record one line; raises EOFError when the command has ended."""
        self._check_runs()
        self.sent.append(line)
        self._lines += self._response.replies(line)

    def send_bytes(self, data: bytes) -> None:
        """Add `data` to `sent_bytes`; raises EOFError when the command has ended."""
        self._check_runs()
        self.sent_bytes += data

    def read_line(self, *, deadline_s: float) -> str:
        """Return the next scripted line; raises DeadlineError, or EOFError after the end."""
        if self._lines:
            return self._lines.popleft()
        self._check_runs()
        raise DeadlineError(f"`{self._command[0]}` did not respond within {deadline_s:g} s", node=self._name)

    def wait(self, *, deadline_s: float) -> Completed:
        """End the conversation; return the scripted result."""
        self._has_ended = True
        return Completed(self._command, self._response.exit_code, b"", self._response.stderr, 0.0)

    def close(self) -> None:
        """Record the call in `is_closed`."""
        self.is_closed = True

    def _check_runs(self) -> None:
        if self._has_ended or self.is_closed:
            raise EOFError(f"`{self._command[0]}` on {self._name} has ended")


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
