import pytest

from csdctl.errors import DeadlineError, InputError, UnreachableError
from csdctl.transport.fake import FakeSession
from csdctl.transport.session import MAX_OUTPUT_BYTES, Session


def test_fake_is_a_session() -> None:
    session: Session = FakeSession("csd0")
    assert session.name == "csd0"


def test_longest_prefix_wins_then_the_latest() -> None:
    fake = (
        FakeSession("csd0")
        .on("git", stdout="any")
        .on("git", "log", stdout="old")
        .on("git", "log", stdout="new")
    )
    assert fake.run(["git", "status"]).output == "any"
    assert fake.run(["git", "log", "-1"], stdin=b"in").output == "new"
    assert fake.commands == [("git", "status"), ("git", "log", "-1")]
    assert fake.stdins == [b"", b"in"]


def test_unscripted_command_ends_like_a_missing_program() -> None:
    completed = FakeSession("csd0").run(["nothing"])
    assert (completed.exit_code, completed.last_error_line) == (127, "nothing: not found")
    with pytest.raises(InputError):
        FakeSession("csd0").run([])


def test_scripted_error_is_raised() -> None:
    fake = FakeSession("csd0").on(error=UnreachableError("gone", node="csd0"))
    with pytest.raises(UnreachableError):
        fake.run(["anything"])
    with pytest.raises(UnreachableError):
        fake.converse(["anything"])


def test_output_is_bounded_as_everywhere() -> None:
    fake = FakeSession("csd0").on("yes", stdout=b"y" * (MAX_OUTPUT_BYTES + 1))
    assert len(fake.run(["yes"]).stdout) == MAX_OUTPUT_BYTES


def test_conversation_replies_times_out_and_ends() -> None:
    fake = FakeSession("csd0").on(
        "worker", stdout="ready\n", stderr="why", replies=lambda line: [line.upper()]
    )
    talk = fake.converse(["worker"])
    assert talk.read_line(deadline_s=1) == "ready"
    talk.send_line("probe")
    assert talk.read_line(deadline_s=1) == "PROBE"
    with pytest.raises(DeadlineError):
        talk.read_line(deadline_s=1)
    assert talk.wait(deadline_s=1).stderr == b"why"
    with pytest.raises(EOFError):
        talk.read_line(deadline_s=1)
    talk.close()
    assert fake.conversations[0].sent == ["probe"]
    assert talk.is_closed
