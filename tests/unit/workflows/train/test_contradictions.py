"""Options that contradict each other are refused before a machine is contacted."""

from pathlib import Path

import pytest

from csdctl.cli.app import run_command
from csdctl.errors import ExitCode, InputError
from csdctl.terminal.streams import Streams
from csdctl.worker.protocol.features import FeatureOptions
from csdctl.workflows.train.spec import TrainOptions

JOB = """\
model: model.py:build
data: {public: {path: public}}
recipe: {epochs: 1, learning_rate: 0.05}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "fleet.yaml").write_text("nodes: [{name: csd0, address: 192.0.2.1}]\n")
    (tmp_path / "model.py").write_text("def build(): ...\n")
    (tmp_path / "public").mkdir()
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--plan", "plan.yaml", "--batch-size", "8"), "--plan and --batch-size"),
        (("--resume", "latest", "--batch-size", "8"), "--resume and --batch-size"),
        (("--resume", "latest", "--plan", "plan.yaml"), "--resume and --plan"),
        (("--resume", "latest", "--strategy", "split"), "--resume and --strategy"),
    ],
)
def test_two_sources_of_batch_sizes_are_refused(
    project: Path, options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (str(project / "job.yaml"), "--fleet", str(project / "fleet.yaml"))
    code = run_command(["train", *where, *options], Streams(directory=project))
    shown = capsys.readouterr().err
    assert (code, expected in shown) == (ExitCode.BAD_INPUT, True), shown


@pytest.mark.parametrize("strategy", ["data-parallel", "split"])
def test_options_of_features_are_refused_with_another_strategy(strategy: str) -> None:
    with pytest.raises(InputError, match=f"--feature-precision float16 .* --strategy {strategy}"):
        TrainOptions(strategy=strategy, features=FeatureOptions("float16", "keras"))
    with pytest.raises(InputError, match=f"--feature-engine litert .* --strategy {strategy}"):
        TrainOptions(strategy=strategy, features=FeatureOptions("float32", "litert"))
    with pytest.raises(InputError, match="--micro-batches 2 .* --strategy features"):
        TrainOptions(strategy="features", num_micro_batches=2)


def test_options_of_a_strategy_that_the_plan_may_choose_are_accepted() -> None:
    TrainOptions(num_micro_batches=2, features=FeatureOptions("float16", "litert"))
