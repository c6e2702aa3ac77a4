"""Set-up of all tests: one session, and limits that suit the machine."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.needs import require
from tests.patience import BACKSTOP_S, PACE_VARIABLE, measure_pace, scaled
from tests.session import Session, remove_stale_sessions

# A shell that runs a job in the background lets it ignore Ctrl-C, and whatever the job starts inherits that.
# The tests that press Ctrl-C must mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same with nohup

# An example may take as long as the machine needs for it.
settings.register_profile("csdctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("csdctl")

# Whatever ends these tests, the fleets that `csdctl emulate up` starts for them end too.
os.environ["CSDCTL_EMULATE_PID"] = str(os.getpid())

# Side by side, a file runs in one process, and files start in this order: none of these may start last.
LONGEST = [
    Path(__file__).parent / directory / f"test_{name}.py"
    for directory, *names in (
        ("emulated", "demo", "strategies", "models", "tune", "main_job"),
        ("lab", "main_job", "privacy"),
        ("emulated", "notebook", "doctor", "power_cut", "runs"),
        ("attacks", "ordinary_user", "foreign_daemon"),
        ("unit/worker/tasks", "verify", "reference", "train"),
        ("unit/worker/compute", "step", "against_fit"),
        ("unit/workflows/data", "prepare"),
        ("attacks", "receiver"),
    )
    for name in names
]
UNIT = Path(__file__).parent / "unit"
UNIT_S = 600.0
"""A unit test that takes longer hangs."""
SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="run the tests that only make test-all runs, too"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the session, in the process that controls the others."""
    sys.argv[1:] = []  # csdctl looks there for its own options, such as -q
    if hasattr(config, "workerinput"):
        return
    remove_stale_sessions()
    session = config.stash[SESSION] = Session()
    if not config.option.basetemp:
        config.option.basetemp = session.directory / "t"
    os.environ[PACE_VARIABLE] = f"{measure_pace():.2f}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End everything that is left; keep the files of a session with failures."""
    started = session.config.stash.get(SESSION, None)
    if started is not None:
        started.end(keep=exitstatus == pytest.ExitCode.TESTS_FAILED)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; leave thorough tests out unless they are asked for."""
    items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))
    for item in items:
        if not item.get_closest_marker("timeout"):
            limit_s = UNIT_S if item.path.is_relative_to(UNIT) else BACKSTOP_S
            item.add_marker(pytest.mark.timeout(scaled(limit_s)))
    if config.getoption("--thorough"):
        return
    left_out = _list_thorough(items)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


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
