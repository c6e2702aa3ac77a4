"""`csdctl measurements`: the tables, the JSON document, and deleting measurements."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_fleet, classify_machine
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import COLLECTIVE, PROBE, TRIAL, MeasurementStore, Overview
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.measurements import measurements_document, render_measurements
from csdctl.terminal.streams import format_json
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
    TrialRank,
)
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.reporting.report import load_measurements
from tests.emulated.running import csdctl
from tests.json_page import check_document

MODEL = ModelProperties("a" * 64, "keras.applications:MobileNetV2", 7, 5, 9, 3)
OTHER = ModelProperties("b" * 64, "/srv/mine[1].py:build", 7, 5, 9, 3)
FACTS = Facts(
    "csd0", architecture="aarch64", cpu_model="Cortex-A53", num_cores=4, tensorflow_version="2.21.0"
)
CSD = classify_machine(FACTS)
HOST = classify_machine(replace(FACTS, cpu_model="Neoverse-N1", num_cores=64))
FLEET = classify_fleet(HOST, [CSD, CSD], "10.1.1.0/24")
ONE = Runtime(4)
TRIED = TrialMeasurement(
    (TrialRank(HOST.key, 64, ONE), *[TrialRank(CSD.key, 8, ONE)] * 6), 0.5, 141.0, 1_700_000_000.0, 150.0
)


@pytest.fixture
def project(tmp_path: Path) -> ProjectDirectory:
    """A project with measurements of a model."""
    project = ProjectDirectory(tmp_path)
    store = MeasurementStore(project.measurements)
    probes = [ProbeMeasurement(ONE, size, 1_700_000_000.0, size / 20, 3) for size in (4, 16)]
    store.add(PROBE, CSD, [*probes, ProbeMeasurement(ONE, 128, 1_700_000_000.0, None)], MODEL, "recipe-1")
    store.add(
        PROBE, CSD, [ProbeMeasurement(Runtime(2, 2, False), 8, 1_700_000_000.0, 1.0)], MODEL, "recipe-1"
    )
    store.add(
        COLLECTIVE,
        FLEET,
        [CollectiveMeasurement("star", 7, 1 << 20, seconds, 1_700_000_000.0) for seconds in (0.1, 0.9, 0.2)],
    )
    store.add(TRIAL, FLEET, [TRIED], MODEL, "recipe-1")
    return project


def shown(project: ProjectDirectory, width: int = 100) -> str:
    file = StringIO()
    console = PrintableConsole(file=file, width=width)
    render_measurements(console, load_measurements(project, print), ".csdctl/measurements.jsonl")
    return file.getvalue()


def words(text: str, *wanted: str) -> list[str]:
    """Return the words of the first line that contains all of `wanted`."""
    return next(line for line in text.splitlines() if all(word in line for word in wanted)).split()


class TestTable:
    def test_rows_of_probes_sums_and_trials(self, project: ProjectDirectory) -> None:
        text = shown(project)
        row = words(text, "MobileNetV2", "4 threads")
        assert row[:5] == [
            "MobileNetV2",
            "recipe",
            CSD.key[:6],
            "4",
            "threads",
        ]
        assert row[5:9] == ["3", "4–16", "<128", "20.0"]
        assert row[9].startswith("2023-11-1")
        row = words(text, "star")
        assert row[:4] == ["star", HOST.key[:6], "+", CSD.key[:6] + ","]
        assert row[4:11] == ["10.1.1.0/24", "7", "1.0", "MiB", "3", "200", "ms"]
        assert words(text, "MobileNetV2", "64 + 6 × 8")[-4:-1] == ["150", "141", "94%"]
        assert text.count("aarch64 Cortex-A53, 4 cores") == 1
        assert f"machine {CSD.key[:6]}: aarch64 Cortex-A53, 4 cores (Python ?, TensorFlow 2.21.0" in text
        wide = " ".join(shown(project, width=200).split())
        assert "2 threads, 2 inter-op, no oneDNN" in wide

    def test_emulated_machines_are_marked_and_names_are_no_markup(self, project: ProjectDirectory) -> None:
        assert "emulated" not in shown(project)
        store = MeasurementStore(project.measurements)
        emulated = classify_machine(FACTS, num_emulated=3)
        store.add(PROBE, emulated, [ProbeMeasurement(ONE, 512, 1.0, None)], OTHER, "[red]")
        assert "emulated with 3 nodes" in shown(project)
        row = words(shown(project), "mine[1].py:build")
        assert (row[1], row[6], row[7]) == ("[red]", "<512", "–")


def test_document_has_all_measurements(project: ProjectDirectory) -> None:
    document = json.loads(format_json(measurements_document(load_measurements(project, print), "here")))
    check_document(document)
    assert document["machine_classes"][CSD.key]["name"] == CSD.name
    probed = next(probe for probe in document["probes"] if probe["settings"]["threads"] == 4)
    assert (probed["model"]["hash"], probed["machine_class"]) == (MODEL.hash, CSD.key)
    best = [probed[name] for name in ("best_batch_size", "best_samples_per_s", "too_large")]
    assert best == [4, 20.0, 128]
    (summed,) = document["collectives"]
    assert (summed["median_s"], summed["fleet_class"]["nodes"]) == (0.2, [CSD.key])
    (tried,) = document["trials"]
    assert (tried["samples_per_s"], tried["predicted_samples_per_s"], len(tried["ranks"])) == (141, 150, 7)
    assert measurements_document(Overview(), "here").keys() == document.keys()


def test_project_without_measurements_gets_a_message_and_no_file(tmp_path: Path) -> None:
    done = csdctl(tmp_path, "measurements")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no measurements yet: `csdctl tune` stores what it measures\n"
    assert list(tmp_path.iterdir()) == []
