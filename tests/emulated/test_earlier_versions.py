"""A project of an earlier version is resumed at another path: from its latest state, or from a checkpoint."""

from pathlib import Path

import pytest

from tests.earlier_projects import ARCHIVES, unpack
from tests.emulated.running import csdctl, document, succeed

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name)
@pytest.mark.parametrize(("has_state", "continues"), [(True, "epoch 3, step 6"), (False, "epoch 3, step 0")])
def test_run_is_resumed(archive: Path, tmp_path: Path, has_state: bool, continues: str) -> None:
    project = unpack(archive, tmp_path)
    *_, run = sorted((project / ".csdctl" / "runs").iterdir())
    if not has_state:
        (run / "step.state").unlink()
    succeed(project, "emulate", "up", "--nodes", "1", "--cpu", "0.5", "--memory", "2G")
    try:
        resumed = succeed(project, "train", "--resume", "latest", "--skip-doctor", "--max-steps", "20")
        assert f"2 ranks continue at {continues}" in resumed.stdout
        assert document(project, "report", run.name)["steps"] == 20
    finally:
        csdctl(project, "emulate", "down")
