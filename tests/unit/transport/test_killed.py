"""csdctl is killed: what it has started on the host ends by itself."""

from pathlib import Path

from csdctl.emulation.limits import FLEET_VARIABLE, list_marked
from tests.patience import eventually
from tests.started_programs import start_and_kill


def test_programs_on_the_host_end_when_csdctl_is_killed(tmp_path: Path) -> None:
    mark = str(tmp_path)
    start_and_kill(str(tmp_path), **{FLEET_VARIABLE: mark})
    assert eventually(lambda: not list_marked(mark))
