"""What holds for all tests."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from csdctl.runs.directory import ProjectDirectory, RunDirectory
from tests.lab.requirements import LAB_DID_NOT_RUN

# A shell that runs a job in the background lets it ignore Ctrl-C, and whatever the job starts inherits that.
# The tests that press Ctrl-C must mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same with nohup

# Whatever ends these tests, the fleets that `csdctl emulate up` starts for them end too.
os.environ["CSDCTL_EMULATE_PID"] = str(os.getpid())

# Side by side, a file runs in one process, and files start in this order: none of these may start last.
LONGEST = [
    Path(__file__).parent / name
    for name in (
        "emulated/test_main_job.py",
        "lab/test_main_job.py",
        "lab/test_privacy.py",
        "emulated/test_tune.py",
        "emulated/test_split.py",
        "emulated/test_features.py",
        "emulated/test_predict.py",
        "attacks/test_hostile_node.py",
        "emulated/test_notebook.py",
        "emulated/test_private_noise.py",
        "attacks/test_ordinary_user.py",
        "attacks/test_foreign_daemon.py",
        "unit/worker/tasks/test_verify_matrix.py",
        "unit/worker/compute/test_exact_gradient.py",
        "unit/worker/compute/test_against_fit.py",
        "unit/workflows/data/test_prepare_functions.py",
    )
]
NUM_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run the further variants of tests that always run, too"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would go through 6,000 tests and TensorFlow repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, and leave the further variants out unless they are asked for."""
    items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))
    if config.getoption("--thorough"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    config.stash[NUM_LEFT_OUT] = len(left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of tests side by side, each process collects all: tell the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_left_out"] = session.config.stash.get(NUM_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("num_left_out", 0)
    node.config.stash[NUM_LEFT_OUT] = max(told, node.config.stash.get(NUM_LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what did not run: the lab, from the reports of its tests, and thorough variants."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(one.longrepr[2]) for one in skipped if isinstance(one.longrepr, tuple)]
    for reason in [one for one in reasons if LAB_DID_NOT_RUN in one][:1]:
        terminalreporter.section(LAB_DID_NOT_RUN, sep="!", yellow=True)
        terminalreporter.line(f"{reason.split(': ', 2)[-1]}: nothing of tests/lab was tested")
    if left_out := terminalreporter.config.stash.get(NUM_LEFT_OUT, 0):
        title = f"{left_out} thorough variant{'s'[: left_out > 1]} of tests did not run"
        terminalreporter.section(title, sep="!", yellow=True)
        terminalreporter.line("make test-all, or pytest --thorough, runs them, too")


@pytest.fixture(scope="session", autouse=True)
def remove_step_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The states of runs that were not finished are kept in the machine's memory, for nobody here."""
    yield
    for path in tmp_path_factory.getbasetemp().rglob(".csdctl/runs/*"):
        ProjectDirectory(path.parents[2]).step_file(RunDirectory(path)).unlink(missing_ok=True)
