"""A run's files that were edited, or come from a stranger."""

import functools
import operator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory, RunDirectory
from tests.unit.runs.manifests import manifest_of


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return ProjectDirectory(tmp_path).new_run()


class TestManifest:
    @pytest.mark.parametrize(
        ("path", "value", "problem"),
        [
            ("schema", 2, "`schema`"),
            ("plan", None, "`plan`"),
            ("plan.ranks.1.batch_size", 10**12, "`plan.ranks.1.batch_size`: .*less than or equal to 1048576"),
            ("plan.ranks.0.node", "csd1", "`plan.ranks`: .*first rank is not `host`"),
            ("plan.ranks.1.node", "host", "`plan.ranks`: .*host is listed more than once"),
            ("plan.ranks.1.node", "csd1", "placed: name of csd1 is csd0, expected csd1"),
            ("plan.ranks.1.step_time_s", -1.0, "`plan.ranks.1.step_time_s`"),
            ("plan.ranks.1.batch_size", 5, "placed: batch_size of csd0 is 4, expected 5"),
            ("placed.1.batch_size", True, "placed: batch_size of csd0 is 1, expected 4"),
            ("placed.1.num_private", -1, "num_private of csd0 is -1, expected 0"),
            ("placed.1.num_repeated", 7, "num_repeated of csd0 is 7, expected 0"),
            ("placed.1.public_start", 99, "placed: public_start of csd0 is 99, expected 100"),
            ("placed.0.public_stop", 101, "public_start of csd0 is 100, expected 101"),
            ("placed.0.public_stop", -1, "public_stop of host is -1, expected 0"),
            ("placed.0.name", "../../etc/passwd", "name of host is ../../etc/passwd"),
            ("placed", [], "different numbers of ranks"),
            ("placed.1.public_stop", 10**30, "public_stop of csd0 is 10{30}, expected 10{15}"),
            ("noise", {"l2_norm_clip": 0, "noise_multiplier": 1, "delta": 0.1}, "`noise.l2_norm_clip`"),
            ("predicted_samples_per_s", -1.0, "`predicted_samples_per_s`"),
            ("predicted_samples_per_s", float("nan"), "`predicted_samples_per_s`"),
            ("data.private", {"csd0": 5}, "`data.private.csd0`"),
        ],
    )
    def test_edited_value_is_named(self, run: RunDirectory, path: str, value: object, problem: str) -> None:
        content: Any = deepcopy(manifest_of())
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        functools.reduce(operator.getitem, parents, content)[last] = value
        run.save_manifest(content)
        with pytest.raises(InputError, match=f"manifest.json.*{problem}") as raised:
            run.load_manifest()
        assert "\n" not in raised.value.message

    @pytest.mark.parametrize("text", ["", "5", "[]", "null", "{}", "[" * 5000, '{"plan": 1, "plan": 2}'])
    def test_text_that_is_no_manifest_is_reported(self, run: RunDirectory, text: str) -> None:
        run.manifest.write_text(text)
        with pytest.raises(InputError, match="manifest.json"):
            run.load_manifest()


class TestLinks:
    @pytest.mark.parametrize("place", ["manifest.json", "events.jsonl", "logs/rank-0.log", "checkpoints"])
    def test_link_in_a_run_is_refused(self, tmp_path: Path, run: RunDirectory, place: str) -> None:
        (run.path / place).symlink_to("/etc")
        for run_id in (None, run.run_id):
            with pytest.raises(InputError, match=f"{place} is a symbolic link"):
                ProjectDirectory(tmp_path).find_run(run_id)

    def test_run_that_is_a_link_is_refused(self, tmp_path: Path, run: RunDirectory) -> None:
        (run.path.parent / "99990101-000000-000000").symlink_to(run.path)
        with pytest.raises(InputError, match="99990101-000000-000000 is a symbolic link"):
            ProjectDirectory(tmp_path).find_run(None)
