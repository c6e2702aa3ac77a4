"""What `tune` asks of the search."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csdctl.tuning.stannis import TuningError
from csdctl.workflows.tune import tune as tune_module
from csdctl.workflows.tune.tune import TuneOptions
from tests.fake_session import FakeSession
from tests.unit.workflows.measured_project import PUBLIC, make_project, prepared, run_context, workspace


def test_nodes_with_private_data_are_in_every_plan_and_public_data_limit_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search:
        def __init__(self, *_: Any, **options: Any) -> None:
            pass

        def tune(self, model: Any) -> None:
            raise TuningError(f"{sorted(model.required)} {model.private_shares}")

    monkeypatch.setattr(tune_module, "FleetMeasurer", lambda *_, **__: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(tune_module, "FitTuner", Search)
    at = make_project(tmp_path, num_nodes=3)
    data = prepared(at)
    data.num_private = {"csd1": 3 * PUBLIC.num_samples}
    space = workspace(at, {name: FakeSession(name) for name in at.fleet.machines})
    with pytest.raises(TuningError, match=r"\['csd1', 'host'\] {'csd1': 0.75}"):
        tune_module.tune_by_fit(run_context(at, space, data), TuneOptions())
