"""Paths are bytes: a project and a home whose names are not UTF-8."""

import os
from pathlib import Path

import pytest

from tests.emulated.small_jobs import dense_model, save_arrays, small_job
from tests.lab.project import Project

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

NAME = os.fsdecode(b"caf\xe9 \xff")


def test_project_and_home_that_are_not_utf8_train(project: Project) -> None:
    project.path /= NAME
    project.path.mkdir()
    (project.path / "model.py").write_text(dense_model(8, 8, 1))
    (project.path / "job.yaml").write_text(small_job("epochs: 1, learning_rate: 0.1, reference_batch: 16"))
    save_arrays(project.path / "public", 96, 8, 8, 1)
    with project.lab.node("bytes", 73, home_in_passwd=f"/root/{NAME}") as node:
        home = node.home / NAME
        save_arrays(home / "private", 96, 8, 8, 1)
        project.use(node, network="10.77.0.0/24")
        for command in (
            ["doctor"],
            ["prepare"],
            ["tune", "--probe-seconds", "0.1"],
            ["train"],
            ["verify"],
            ["report", "--html", "report.html", "--csv", "report.csv"],
            ["predict", "latest"],
        ):
            done = project.csdctl(*command)
            assert done.returncode == 0, f"{command}: {done.stdout + done.stderr}"
        assert list((home / ".csdctl/machines").iterdir())
        assert r"caf\udce9 \udcff" in Path(project.path / "report.html").read_text()
        done = project.csdctl("clean", "--everything", "--yes")
        assert done.returncode == 0, done.stderr
        assert {path.name for path in home.iterdir()} <= {"private", ".csdctl", ".keras", ".bashrc", ".cshrc"}
