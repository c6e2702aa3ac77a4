from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.tuning.plan import Plan, Predicted, RankPlan, load_plan, save_plan

PLAN = Plan(
    job="job",
    job_fingerprint="0123456789abcdef",
    method="stannis",
    emulated=True,
    method_arguments={"batch_sizes": [4, 8], "C": 2.0, "E": 20.0},
    num_probes=12,
    measuring_s=3.5,
    predicted=Predicted(
        global_batch=340,
        batch_sizes=[315, 25],
        step_s=11.0,
        samples_per_s=31.0,
        compute_share=0.9,
        imbalance_share=0.0,
        communication_share=0.1,
        is_confirmed=True,
    ),
    ranks=[
        RankPlan(node="host", batch_size=315, threads=16, step_time_s=10.0, samples_per_s=31.5),
        RankPlan(node="csd0", batch_size=25, threads=4, step_time_s=8.0, peak_memory_bytes=1 << 30),
    ],
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_plan(tmp_path / "plans" / "job.yaml", PLAN)
    return tmp_path / "plans" / "job.yaml"


def test_plan_is_read_back_as_it_was_saved_and_a_missing_one_is_an_error(path: Path) -> None:
    assert load_plan(path) == PLAN
    path.unlink()
    with pytest.raises(InputError, match="csdctl tune") as raised:
        load_plan(path)
    assert str(path) in raised.value.message


def test_plan_of_a_newer_csdctl_is_said_to_be_so(path: Path) -> None:
    path.write_text(path.read_text().replace("schema_version: 1", "schema_version: 2"))
    with pytest.raises(
        InputError, match=f"{path} was written by a newer csdctl: received schema 2"
    ) as raised:
        load_plan(path)
    assert raised.value.remedy == "update this csdctl"


@pytest.mark.parametrize(
    ("written", "edited", "message"),
    [
        *(
            ("batch_size: 25", f"batch_size: {size}", f":LINE: `ranks.1.batch_size`: .*{expected}")
            for size, expected in (
                (-1, "greater than or equal to 0 .received -1"),
                (2.5, "whole number.*received 2.5"),
                (10**12, "less than or equal to 1048576"),
            )
        ),
        ("threads: 4", "thread: 4", ":LINE: unknown key `ranks.1.thread`, did you mean `threads`"),
        ("step_time_s: 8.0", "step_time_s: .nan", ":LINE: `ranks.1.step_time_s`"),
        ("node: csd0", "node: '-rf /'", ":LINE: `ranks.1.node`"),
        ("batch_size: 25", "batch_size: 25\n  max_batch_size: 24", "25 is above max_batch_size 24"),
        ("batch_size: 25", "batch_size: 0", "csd0: only the host can have batch size 0"),
        ("node: host", "node: csd1", "the first rank is not `host` but csd1"),
        ("node: csd0", "node: host", "host is listed more than once"),
        ("global_batch: 340", "global_batch: 341", "batch_sizes add up to 340, but global_batch is 341"),
    ],
)
def test_bad_value_is_named_with_its_line_and_what_it_contradicts(
    path: Path, written: str, edited: str, message: str
) -> None:
    text = path.read_text()
    line = next(number for number, line in enumerate(text.splitlines(), 1) if written in line)
    path.write_text(text.replace(written, edited))
    with pytest.raises(InputError, match=message.replace("LINE", str(line))):
        load_plan(path)


def test_prediction_does_not_hold_after_moving_samples_between_ranks(path: Path) -> None:
    unpredicted = PLAN.model_copy(update={"predicted": None})
    assert unpredicted.predicted_samples_per_s == pytest.approx(340 / 10.0), "by the slowest step"
    unmeasured = [PLAN.ranks[0], RankPlan(node="csd0", batch_size=25, threads=4)]
    assert unpredicted.model_copy(update={"ranks": unmeasured}).predicted_samples_per_s is None
    assert load_plan(path).predicted_samples_per_s == 31.0
    moved = path.read_text().replace("batch_size: 315", "batch_size: 300")
    path.write_text(moved.replace("batch_size: 25", "batch_size: 40"))
    assert load_plan(path).global_batch == 340
    assert load_plan(path).prediction is None


def test_host_alone_can_sit_out(path: Path) -> None:
    host = replace(PLAN.ranks[0], batch_size=0)
    save_plan(path, PLAN.model_copy(update={"ranks": [host, PLAN.ranks[1]]}))
    assert load_plan(path).global_batch == 25
