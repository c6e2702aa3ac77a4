"""What a program on a machine answers: frames, typed by their kind, in bounded time."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, DeadlineError, InputError, RemoteCommandError
from csdctl.transport.local import LocalSession
from csdctl.transport.program import MAX_TEXT_LENGTH, AnswerLimits, Program, ProgramEndedError, within
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.json_codec import Count, to_frame
from tests.fake_session import FakeSession
from tests.patience import scaled


@dataclass(frozen=True)
class Sum:
    """The answer of the program in these tests."""

    total: Count


def call(**answer: Any) -> Sum:
    session = FakeSession("csd2").on("python3", **answer)
    return Program(session, ["python3"], "adding", within(1.0)).call({"terms": [1, 2]}, Sum)


def failure(**answer: Any) -> CsdctlError:
    with pytest.raises(CsdctlError) as raised:
        call(**answer)
    assert raised.value.node == "csd2"
    return raised.value


def error_frame(exit_code: int, message: str = "there is no data", remedy: str = "fix the path") -> str:
    return to_frame("error", {"message": message, "remedy": remedy, "exit_code": exit_code})


def test_result_is_found_in_any_output() -> None:
    result = to_frame("result", Sum(3))
    assert call(stdout=result) == Sum(3)
    assert call(stdout=f"hello from the user's own model file\n{result}\nand from its atexit\n") == Sum(3)


def test_request_is_one_line_and_progress_comes_before_the_result() -> None:
    working = [PrepareProgress(number, 7, 1) for number in (0, 7)]
    frames = ["noise", *(to_frame("progress", progress) for progress in working), to_frame("result", Sum(3))]
    session = FakeSession("csd2").on("python3", replies=lambda line: frames)
    news: list[PrepareProgress] = []
    with closing(Program(session, ["python3"], "adding", AnswerLimits())) as program:
        assert program.call({"terms": [1, 2]}, Sum, news.append) == Sum(3)
    assert (news, session.conversations[0].sent) == (working, ['{"terms": [1, 2]}'])


@pytest.mark.parametrize(("exit_code", "expected"), [(2, InputError), (1, RemoteCommandError)])
def test_reported_error_is_raised(exit_code: int, expected: type[CsdctlError]) -> None:
    error = failure(exit_code=exit_code, stdout=f"warning\n{error_frame(exit_code)}")
    assert type(error) is expected
    assert (error.message, error.remedy) == ("there is no data", "fix the path")
    assert len(failure(stdout=error_frame(exit_code, "x" * 5000)).message) == MAX_TEXT_LENGTH


@pytest.mark.parametrize(
    "stdout",
    [
        *("@csdctl-result", "@csdctl-result 5", "@csdctl-result null", '@csdctl-result {"total": -1}'),
        *('@csdctl-result {"total": "3"}', '@csdctl-result {"total": 3, "more": 1}', "@csdctl-result {}"),
        *('@csdctl-data "', "@csdctl-result " + "[" * 99_999, '@csdctl-result {"total": ' + "9" * 9999 + "}"),
        *(error_frame(2)[:40], '@csdctl-error {"message": 5}', '@csdctl-progress {"num_done": "9"}'),
    ],
    ids=lambda stdout: stdout[:40],
)
def test_other_frames_are_an_error_of_the_node(stdout: str) -> None:
    error = failure(stdout=stdout)
    assert isinstance(error, RemoteCommandError)
    assert error.message.startswith("adding: invalid answer: ")
    assert len(error.message) < 300


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("exit_code", "stderr", "message"),
    [
        (1, "Traceback …\nImportError: libmpi.so\n", "exit code 1: ImportError: libmpi.so"),
        (137, "", "most likely out of memory"),
        (2, "", "adding failed with exit code 2"),
    ],
)
def test_program_without_a_frame_is_reported_by_its_end(exit_code: int, stderr: str, message: str) -> None:
    error = failure(exit_code=exit_code, stderr=stderr)
    assert isinstance(error, ProgramEndedError)
    assert message in error.message
    assert error.done.exit_code == exit_code


SAME = to_frame("progress", PrepareProgress(3, 7, 1))


class TestRunning:
    """Real processes."""

    @staticmethod
    def run(directory: Path, script: str, patience: AnswerLimits) -> Sum:
        with (
            closing(LocalSession("csd2", directory)) as session,
            closing(Program(session, ["sh", "-c", script], "adding", patience)) as program,
        ):
            return program.call({}, Sum)

    def test_end_without_a_result_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ProgramEndedError, match="adding ended without a result"):
            self.run(tmp_path, "echo hello", AnswerLimits(scaled(60)))

    @pytest.mark.parametrize(
        ("script", "patience", "message"),
        [
            ("sleep 1000", AnswerLimits(silence_s=0.2), "adding: no line for 0.2 s"),
            ("while :; do echo; sleep 0.1; done", AnswerLimits(whole_s=0.5), "adding took more than 0.5 s"),
            ("while :; do echo; sleep 0.1; done", AnswerLimits(standstill_s=0.5), "got no further for"),
            (
                f"while :; do echo '{SAME}'; sleep 0.1; done",
                AnswerLimits(whole_s=scaled(10), standstill_s=0.5),
                "got no further for",
            ),
        ],
    )
    def test_patience_has_an_end(
        self, tmp_path: Path, script: str, patience: AnswerLimits, message: str
    ) -> None:
        with pytest.raises(DeadlineError, match=message):
            self.run(tmp_path, script, patience)

    def test_program_that_prints_without_pause_is_ended(self, tmp_path: Path) -> None:
        with pytest.raises(RemoteCommandError, match="expected one each second"):
            self.run(tmp_path, "yes", AnswerLimits(spare_lines=10))
