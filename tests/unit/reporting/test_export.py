"""What `export` writes, read back by the tools it is for."""

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from csdctl.errors import InputError
from csdctl.reporting.export import render_prometheus, scalars_of, write_tensorboard
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.reporting.report import export
from tests.unit.reporting.test_page import EVIL, results


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    run = results()
    write_tensorboard(run, tmp_path)
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    reader.Reload()
    expected = list(scalars_of(run))
    tags = reader.Tags()["scalars"]
    assert sum(len(reader.Scalars(tag)) for tag in tags) == len(expected)
    losses = [(event.step, event.value, event.wall_time) for event in reader.Scalars("epoch/loss")]
    wanted = [(s.step, s.value, s.time_s) for s in expected if s.name == "epoch/loss"]
    assert losses == [pytest.approx(point) for point in wanted]


def test_prometheus_reads_every_family_whatever_the_names() -> None:
    run = results()
    families = {family.name: family for family in text_string_to_metric_families(render_prometheus(run))}
    assert families["csdctl_run_epochs"].samples[0].value == 2
    rates = families["csdctl_rank_samples_per_second"].samples
    assert [sample.labels["node"] for sample in rates] == ["host", EVIL]
    by_class = {s.labels["class"]: s.value for s in families["csdctl_run_sent_bytes"].samples}
    assert by_class == {"gradient": 1 << 20, "control": 1 << 10}
    assert all(math.isfinite(s.value) for family in families.values() for s in family.samples)
    assert all(family.documentation for family in families.values())


@pytest.mark.parametrize(
    ("to", "output", "uri"), [("excel", None, None), ("csv", None, "http://x"), ("mlflow", Path("a"), None)]
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, to: str, output: Path | None, uri: str | None
) -> None:
    with pytest.raises(InputError, match="--to|--tracking-uri"):
        export(ProjectDirectory(tmp_path), None, to, output, uri)
