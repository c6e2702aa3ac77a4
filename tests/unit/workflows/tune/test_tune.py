"""What `tune` asks of the search."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.tuning.stannis import TuningError
from csdctl.workflows.tune import tune
from csdctl.workflows.tune.tune import TuneOptions
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, make_project, prepared, run_context, workspace


def test_nodes_with_private_data_are_in_every_plan_and_public_data_limit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search:
        def __init__(self, *_: Any) -> None:
            pass

        def tune(self, model: Any) -> None:
            raise TuningError(f"{sorted(model.required)} {model.max_host_share:.2f}")

    monkeypatch.setattr(tune, "FleetMeasurer", lambda *_: nullcontext(SimpleNamespace(find_other_work=dict)))
    monkeypatch.setattr(tune, "FitTuner", Search)
    at = make_project(tmp_path, num_nodes=3)
    data = prepared(at)
    data.num_private = {"csd1": 3 * PUBLIC.num_samples}
    space = workspace(at, {name: FakeSession(name) for name in at.fleet.machines})
    with pytest.raises(TuningError, match=r"\['csd1', 'host'\] 0.25"):
        tune.tune_by_fit(run_context(at, space, data), TuneOptions(), None)  # type: ignore[arg-type]
