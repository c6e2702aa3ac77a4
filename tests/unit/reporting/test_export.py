"""What `export` writes, read back by the tools it is for."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.reporting.report import export, scalars_of, write_tensorboard
from tests.unit.reporting.test_page import results


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


@pytest.mark.parametrize(
    ("to", "output", "uri"),
    [("excel", None, None), ("tensorboard", None, "http://x"), ("mlflow", Path("a"), None)],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, to: str, output: Path | None, uri: str | None
) -> None:
    with pytest.raises(InputError, match="--to|--tracking-uri"):
        export(ProjectDirectory(tmp_path), None, to, output, uri)
