"""csdctl is killed: what it has started on nodes ends by itself, as OpenSSH's server ends nothing there."""

import pytest

from tests.lab.project import Project
from tests.patience import eventually
from tests.started_programs import COMMAND, ENVIRONMENT

pytestmark = pytest.mark.lab


@pytest.mark.fault(24)
def test_programs_on_a_node_end_when_csdctl_is_killed(project: Project) -> None:
    node = project.lab.near[0]
    project.use(node)
    start = (*COMMAND, str(project.path), node.name)
    process = project.lab.host.start(*start, cwd=project.path, environment=ENVIRONMENT)
    assert process.stdout
    try:
        assert process.stdout.readline() == "started\n"
        assert len(node.commands()) > 10
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: not node.commands()), node.commands()
