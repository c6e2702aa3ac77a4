"""Set-up of all tests: one session, limits that suit the machine, and a summary of what did not run."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import describe_skipped, require
from tests.patience import BACKSTOP_S, PACE_VARIABLE, measure_pace, scaled
from tests.session import Session, remove_stale_sessions

# A shell that runs a job in the background lets it ignore Ctrl-C, and whatever the job starts inherits that.
# The tests that press Ctrl-C must mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same with nohup

pytest_plugins = ["tests.hangs"]

# An example may take as long as the machine needs for it.
settings.register_profile("csdctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("csdctl")

# Whatever ends these tests, the fleets that `csdctl emulate up` starts for them end too.
os.environ["CSDCTL_EMULATE_PID"] = str(os.getpid())

# Side by side, a file runs in one process, and files start in this order: none of these may start last.
LONGEST = [
    Path(__file__).parent / directory / f"test_{name}.py"
    for directory, *names in (
        ("emulated", "demo", "features", "predict", "augment", "tune", "main_job"),
        ("lab", "main_job", "privacy"),
        ("emulated", "api", "strategies", "init", "private_noise", "notebook", "doctor", "runs"),
        ("attacks", "hostile_node", "ordinary_user", "foreign_daemon"),
        ("unit/worker/tasks", "verify", "reference", "train"),
        ("unit/worker/compute", "step", "against_fit"),
        ("unit/workflows/data", "prepare"),
        ("attacks", "receiver"),
    )
    for name in names
]
WAITING = [Path(__file__).parent / "unit" / name for name in ("launch", "supervision", "transport")]
"""The directories of tests that mostly wait: a core idles while all processes run such."""
NUM_LEFT_OUT = pytest.StashKey[int]()
SESSION = pytest.StashKey[Session]()
HAS_FAILED = pytest.StashKey[bool]()
BROKEN = pytest.StashKey[list[tuple[BaseException, str]]]()
"""The errors of fixtures, which pytest raises again for every test, and the first test that had each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run the tests that only make test-all runs, too"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the session, in the process that controls the others."""
    config.stash[BROKEN] = []
    sys.argv[1:] = []  # csdctl looks there for its own options, such as -q
    if hasattr(config, "workerinput"):
        return
    remove_stale_sessions()
    session = config.stash[SESSION] = Session()
    if not config.option.basetemp:
        config.option.basetemp = session.directory / "t"
    os.environ[PACE_VARIABLE] = f"{measure_pace():.2f}"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End everything that is left; keep the files of a session with failures."""
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.end(keep=config.stash.get(HAS_FAILED, False))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Tell the reporting process what was left out; of tests side by side, each process collects all."""
    session.config.stash[HAS_FAILED] = exitstatus == pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_left_out"] = session.config.stash.get(NUM_LEFT_OUT, 0)


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
    """Begin with the longest files; leave thorough tests out unless they are asked for."""
    places = _plan_order(list(dict.fromkeys(item.path for item in items)))
    items.sort(key=lambda item: places[item.path])
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(scaled(BACKSTOP_S)))
    if config.getoption("--thorough"):
        return
    left_out = _list_thorough(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
    config.stash[NUM_LEFT_OUT] = len(left_out)


def _plan_order(files: list[Path]) -> dict[Path, float]:
    """Return the place of each file: the longest first, and those that wait spread among the others."""
    places: dict[Path, float] = {file: number - len(LONGEST) for number, file in enumerate(LONGEST)}
    shorter = [file for file in files if file not in places]
    for is_waiting in (True, False):
        part = [file for file in shorter if (file.parent in WAITING) == is_waiting]
        places |= {file: number / len(part) for number, file in enumerate(part)}
    return places


def _list_thorough(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests marked `thorough`, and of those marked `first(n)` all but the first n parameters."""
    seen, left_out = Counter[str](), set[pytest.Item]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        first = item.get_closest_marker("first")
        if item.get_closest_marker("thorough") or (first and seen[function] >= first.args[0]):
            left_out.add(item)
        else:
            seen[function] += 1
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs this machine does not meet."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the error of a fixture that tests share once; the tests behind it say that they did not run."""
    report = yield
    if call.when == "setup" and report.failed and call.excinfo is not None:
        broken = item.config.stash[BROKEN]
        first = next((test for error, test in broken if error is call.excinfo.value), "")
        if not first:
            broken.append((call.excinfo.value, item.nodeid))
        else:
            reason = f"not run: what this file sets up has failed, see {first}"
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    num_left_out = getattr(node, "workeroutput", {}).get("num_left_out", 0)
    node.config.stash[NUM_LEFT_OUT] = max(num_left_out, node.config.stash.get(NUM_LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what did not run, and what makes it run."""
    config = terminalreporter.config
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    ]
    if reasons:
        terminalreporter.section(f"{len(reasons)} tests did not run here", sep="!", yellow=True)
        for line in describe_skipped(reasons):
            terminalreporter.line(line)
    if left_out := config.stash.get(NUM_LEFT_OUT, 0):
        terminalreporter.section(f"{left_out} thorough tests did not run", sep="!", yellow=True)
        terminalreporter.line("make test-all runs them, too")
    if (session := config.stash.get(SESSION, None)) and terminalreporter.stats.get("failed"):
        terminalreporter.line(
            f"The files of this session are kept in {session.directory} until the next one."
        )
