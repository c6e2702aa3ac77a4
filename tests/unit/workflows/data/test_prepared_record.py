"""The record of prepared data is valid for the same data section only."""

from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.job.model import Job, load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.workflows.data.prepare import find_changed, load_prepared, save_prepared

PUBLIC = DatasetInfo("p", 60_000, (28, 28, 1), "uint8", (), 9, "f", {"undecodable": 2}, {"cat": 5})
PRIVATE = {"csd0": DatasetInfo("q", 500, (28, 28, 1), "uint8", (), 9, "e")}
JOB = """\
model: keras.applications:MobileNetV2
data: {public: {path: data}, private: {path: /data/private, function: read.py:read}}
recipe: {epochs: 3, learning_rate: 0.1}
"""
DESCRIBED = {"images_sha256": "0" * 64, "num_samples": 501, "path": "/etc", "max_label": 8}


def written(directory: Path, text: str = JOB) -> Job:
    (directory / "job.yaml").write_text(text)
    return load_job(directory / "job.yaml")


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    (tmp_path / "read.py").write_text("def read(path): ...\n")
    project = ProjectDirectory(tmp_path)
    save_prepared(project, written(tmp_path), {"public": PUBLIC}, PRIVATE)
    return project


def test_record_has_shapes_and_counts_but_no_names(project: ProjectDirectory) -> None:
    data = load_prepared(project, written(project.root))
    assert data
    assert (data.num_samples, data.num_private) == (60_500, {"csd0": 500})
    assert (data.public.sample_shape, data.public.class_counts) == ((28, 28, 1), {})
    assert '"q"' not in project.prepared("job").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "is_valid"),
    [
        ("job.yaml", "epochs: 3", "epochs: 9", True),
        ("job.yaml", "path: data}", "path: other}", False),
        ("job.yaml", "/data/private", "/data/mine", False),
        ("read.py", "...", "return 1", False),  # a function that changed may read other data
    ],
)
def test_other_data_has_no_record(
    project: ProjectDirectory, file: str, old: str, new: str, is_valid: bool
) -> None:
    path = project.root / file
    path.write_text(path.read_text().replace(old, new))
    assert bool(load_prepared(project, load_job(project.root / "job.yaml"))) is is_valid


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"key": 1, "other": 2}', '{"digests": 5}'])
def test_damaged_record_is_none(project: ProjectDirectory, text: str) -> None:
    project.prepared("job").write_text(text)
    assert load_prepared(project, written(project.root)) is None
    assert find_changed(project, written(project.root), PRIVATE) == []


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        ({}, []),
        ({"fingerprint": "other", "num_samples": 7}, []),  # prepared anew
        *(({name: value}, ["csd0"]) for name, value in DESCRIBED.items()),
    ],
)
def test_other_description_of_the_same_data_is_found(
    project: ProjectDirectory, edit: dict[str, object], found: list[str]
) -> None:
    job = written(project.root)
    save_prepared(project, job, {"public": PUBLIC}, {})  # nodes that do not take part are remembered
    datasets = {"public": PUBLIC, "csd0": replace(PRIVATE["csd0"], **edit), "csd1": PRIVATE["csd0"]}
    assert find_changed(project, job, datasets) == found
