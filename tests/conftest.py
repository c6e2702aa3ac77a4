"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

from csdctl.runs.directory import ProjectDirectory, RunDirectory
from tests.lab.requirements import LAB_DID_NOT_RUN

# A shell that runs a job in the background lets it ignore Ctrl-C, and whatever the job starts inherits that.
# The tests that press Ctrl-C must mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that there was no lab, from the reports: of tests side by side nothing else comes here."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(one.longrepr[2]) for one in skipped if isinstance(one.longrepr, tuple)]
    for reason in [one for one in reasons if LAB_DID_NOT_RUN in one][:1]:
        terminalreporter.section(LAB_DID_NOT_RUN, sep="!", yellow=True)
        terminalreporter.line(f"{reason.split(': ', 2)[-1]}: nothing of tests/lab was tested")


@pytest.fixture(scope="session", autouse=True)
def remove_step_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The states of runs that were not finished are kept in the machine's memory, for nobody here."""
    yield
    for path in tmp_path_factory.getbasetemp().rglob(".csdctl/runs/*"):
        ProjectDirectory(path.parents[2]).step_file(RunDirectory(path)).unlink(missing_ok=True)
