"""Paths are bytes: all commands in a project, and on a node, whose directory is not UTF-8."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.emulated.running import document, emulated, home_of, refuse, succeed
from tests.emulated.small_jobs import dense_model, save_arrays

pytestmark = pytest.mark.emulated

NAME = os.fsdecode(b"caf\xe9 \xff")
SHOWN = r"caf\udce9 \udcff"
DATA = os.fsdecode(b"donn\xe9es.npz")


def test_project_and_home_that_are_not_utf8(tmp_path: Path) -> None:
    project = tmp_path / NAME
    project.mkdir()
    with emulated(project, 1, {"model.py": dense_model(8, 8, 1)}):
        save_arrays(home_of(project, "csd0") / "private", 48, 8, 8, 1)
        samples = np.random.default_rng(0).integers(0, 256, (48, 8, 8, 1), dtype=np.uint8)
        np.savez(project / DATA, x=samples, y=np.arange(48) % 3)
        succeed(project, "init", "--model", "model.py:build", "--public", DATA)
        job = (project / "job.yaml").read_text()
        assert r'"donn\uDCE9es.npz"' in job
        job = job.replace("# private: {path: PATH}", "private: {path: ~/private}").replace(
            "epochs: 10", "epochs: 1"
        )
        (project / "job.yaml").write_text(job)
        succeed(project, "doctor")
        assert SHOWN in succeed(project, "prepare").stdout
        succeed(project, "tune", "--probe-seconds", "0.1")
        succeed(project, "train", "--skip-doctor")
        succeed(project, "verify")
        succeed(project, "report", "--html", "report.html", "--csv", "report.csv")
        assert SHOWN in (project / "report.html").read_text()
        run = Path(document(project, "report")["path"])
        assert os.fsencode(run).startswith(os.fsencode(project))
        assert (run / "model.keras").exists()
        succeed(project, "predict", "latest", "--on", "all")
        assert len((project / "predictions.csv").read_text().splitlines()) == 1 + 48 + 48
        said = refuse(project, "train", f"{NAME}.yaml", environment={**os.environ, "LC_ALL": "C"})
        assert f"{SHOWN}.yaml does not exist" in said
        succeed(project, "clean", "--everything", "--yes")
