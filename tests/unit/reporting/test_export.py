"""What `report --tensorboard` writes, read back by the tool it is for."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from csdctl.workflows.reporting.report import scalars_of, write_tensorboard
from tests.unit.reporting.test_page import results


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    run = results()
    write_tensorboard(run, tmp_path)
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    reader.Reload()
    expected = list(scalars_of(run))
    assert sum(len(reader.Scalars(tag)) for tag in reader.Tags()["scalars"]) == len(expected)
    losses = [(event.step, event.value, event.wall_time) for event in reader.Scalars("epoch/loss")]
    wanted = [(s.step, s.value, s.time_s) for s in expected if s.name == "epoch/loss"]
    assert losses == [pytest.approx(point) for point in wanted]
