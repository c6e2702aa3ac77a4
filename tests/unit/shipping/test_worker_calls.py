import hashlib
import json
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import CsdctlError, DeadlineError, InputError, RemoteCommandError
from csdctl.shipping.store import store_bytes
from csdctl.shipping.worker_calls import WorkPatience, build_worker_command, run_worker, watch_worker
from csdctl.shipping.worker_zip import pack_worker
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.json_codec import (
    ANSWER_PREFIX,
    PROGRESS_PREFIX,
    WORKER_ERROR_PREFIX,
    from_json,
    to_json,
)
from tests.fake_session import FakeSession
from tests.patience import scaled

INFO = DatasetInfo("/data", 10, (28, 28, 1), "uint8", (), 9, "abc")


def call(**answer: Any) -> DatasetInfo:
    session = FakeSession("csd2").on("python3", **answer)
    found = run_worker(
        session, "python3", "worker.pyz", ["prepare"], DatasetInfo, doing="preparing data", deadline_s=1
    )
    assert session.commands == [tuple(build_worker_command("python3", "worker.pyz", ["prepare"]))]
    return found


def failure(**answer: Any) -> CsdctlError:
    with pytest.raises(CsdctlError) as raised:
        call(**answer)
    assert raised.value.node == "csd2"
    return raised.value


def error_line(exit_code: int, message: str = "there is no data", remedy: str = "fix the path") -> str:
    content = {"message": message, "remedy": remedy, "exit_code": exit_code}
    return f"{WORKER_ERROR_PREFIX}{json.dumps(content)}\n"


def test_command_is_unbuffered() -> None:
    command = build_worker_command("/venv/bin/python", "a/w.pyz", ["rank", "--spec", "s"])
    assert command[:4] == ["/venv/bin/python", "-P", "-u", "-c"]
    assert command[5:] == ["a/w.pyz", "rank", "--spec", "s"]
    assert "\n" not in command[4]


def test_worker_runs_from_the_zip_that_was_checked(tmp_path: Path) -> None:
    worker = store_bytes(pack_worker(), ".pyz", tmp_path)
    (tmp_path / "hashlib.py").write_text("raise SystemExit('a module of the working directory was imported')")
    with closing(LocalSession("csd2", tmp_path)) as session:
        done = session.run(build_worker_command(sys.executable, worker.path, ["--help"]))
    assert "usage: csdctl.worker" in done.output, done.stderr


@pytest.mark.attack(7)
def test_worker_that_was_changed_does_not_run(tmp_path: Path) -> None:
    worker = store_bytes(pack_worker(), ".pyz", tmp_path)
    with zipfile.ZipFile(worker.source, "w") as changed:
        changed.writestr("__main__.py", "print('the neighbour was here')")
    with closing(LocalSession("csd2", tmp_path)) as session:
        done = session.run(build_worker_command(sys.executable, worker.path, ["--help"]))
    assert done.exit_code == 1
    assert done.last_error_line.endswith("has been changed since csdctl sent it: deploy again")
    assert not done.output


def test_response_is_found_in_any_output_of_a_users_model() -> None:
    answer = ANSWER_PREFIX + to_json(INFO)
    assert call(stdout=answer) == INFO
    assert call(stdout=f"hello from the user's own model file\n{answer}\nand from its atexit\n") == INFO


def test_bad_input_reported_by_the_worker_is_an_input_error() -> None:
    error = failure(exit_code=2, stderr=f"warning\n{error_line(2)}")
    assert isinstance(error, InputError)
    assert (error.message, error.remedy) == ("there is no data", "fix the path")


def test_other_failure_of_the_worker_is_an_error_of_the_node() -> None:
    error = failure(exit_code=1, stderr=f"{error_line(1)}a last line of Python\n")
    assert isinstance(error, RemoteCommandError)
    assert (error.message, error.remedy) == ("there is no data", "fix the path")


def test_last_error_line_of_the_worker_wins() -> None:
    assert failure(exit_code=1, stderr=error_line(2, "first") + error_line(1, "last")).message == "last"


@pytest.mark.parametrize(
    "stderr", [error_line(2)[:30], f'{WORKER_ERROR_PREFIX}{{"message": "m"}}', "@csdctl-error 5"]
)
def test_truncated_error_line_is_an_error_of_the_node(stderr: str) -> None:
    error = failure(exit_code=2, stderr=stderr)
    assert isinstance(error, RemoteCommandError)
    assert "preparing data failed with exit code 2" in error.message


def test_worker_without_an_error_line_is_reported_by_its_last_line() -> None:
    error = failure(exit_code=1, stderr="Traceback …\nImportError: libmpi.so\n")
    assert error.message == "preparing data failed with exit code 1: ImportError: libmpi.so"


@pytest.mark.fault(22)
def test_killed_worker_is_reported_as_out_of_memory() -> None:
    assert "out of memory" in failure(exit_code=137).message


@pytest.mark.parametrize("stdout", ["", "hello", to_json(INFO)[:-5], '{"schema": 2}', "{}"])
def test_invalid_response_is_an_error_of_the_node(stdout: str) -> None:
    error = failure(stdout=stdout)
    assert isinstance(error, RemoteCommandError)
    assert error.message.startswith("preparing data: invalid response: ")


class TestWatching:
    @staticmethod
    def watch(
        directory: Path, program: str, deadline_s: float = scaled(60)
    ) -> tuple[DatasetInfo, list[PrepareProgress]]:
        path = f"{hashlib.sha256(program.encode()).hexdigest()}.py"
        (directory / path).write_text(program)
        news: list[PrepareProgress] = []
        with closing(LocalSession("csd2", directory)) as session:
            info = watch_worker(
                session,
                sys.executable,
                path,
                "prepare",
                PrepareSpec("/data", "store"),
                DatasetInfo,
                news.append,
                doing="preparing data",
                patience=WorkPatience(silence_s=deadline_s),
            )
        return info, news

    def test_worker_gets_its_request_on_stdin_and_reports_progress(self, tmp_path: Path) -> None:
        working = [PrepareProgress(number, 7, 1) for number in (0, 7)]
        lines = ["noise", *(PROGRESS_PREFIX + to_json(one) for one in working), ANSWER_PREFIX + to_json(INFO)]
        program = "import sys\nassert sys.argv[1:] == ['prepare']\nopen('received', 'w').write(input())\n"
        info, news = self.watch(tmp_path, program + "".join(f"print({line!r})\n" for line in lines))
        assert (info, news) == (INFO, working)
        assert from_json(PrepareSpec, (tmp_path / "received").read_text()) == PrepareSpec("/data", "store")

    def test_error_reported_by_the_worker_is_raised(self, tmp_path: Path) -> None:
        program = f"import sys\nsys.stderr.write({error_line(2)!r})\nsys.exit(2)\n"
        with pytest.raises(InputError, match="csd2: there is no data"):
            self.watch(tmp_path, program)

    @pytest.mark.parametrize("line", ["", PROGRESS_PREFIX + "{", ANSWER_PREFIX + "{}"])
    def test_invalid_or_missing_line_is_an_error_of_the_node(self, tmp_path: Path, line: str) -> None:
        with pytest.raises(RemoteCommandError, match="csd2: preparing data: invalid response"):
            self.watch(tmp_path, f"print({line!r})\n")

    def test_silent_worker_is_ended(self, tmp_path: Path) -> None:
        with pytest.raises(DeadlineError):
            self.watch(tmp_path, "import time\ntime.sleep(1000)\n", deadline_s=0.5)
