"""The data that `predict` chooses, and the rules of its results."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.shipping.store import StoredFile
from csdctl.worker.protocol.features import SIGMOID, SOFTMAX, VALUES, ResultRule
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.predict.predict import (
    CLASSES,
    EMBEDDINGS,
    SCORES,
    build_rules,
    check_layer,
    choose_data,
    find_model,
)
from tests.unit.runs.manifests import manifest_of

PUBLIC = "model: trained.keras\ndata: {public: {path: public}}\nrecipe: {epochs: 1}\n"
PRIVATE = PUBLIC.replace("}}", "}, private: {path: /data/private}}")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "trained.keras").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "public").mkdir()
    (tmp_path / "job.yaml").write_text(PRIVATE)
    (tmp_path / "open.yaml").write_text(PUBLIC)
    return tmp_path


@pytest.mark.parametrize(
    ("on", "job", "expected"),
    [
        (None, "job.yaml", ("private",)),
        (None, "open.yaml", ("public",)),
        ("public", "job.yaml", ("public",)),
        ("all", "job.yaml", ("public", "private")),
    ],
)
def test_chosen_data(project: Path, on: str | None, job: str, expected: tuple[str, ...]) -> None:
    assert choose_data(on, load_job(project / job)) == expected
    with pytest.raises(InputError, match="has no validation data"):
        choose_data("validation", load_job(project / job))


def test_model_of_a_run_comes_with_its_job(project: Path) -> None:
    directory = ProjectDirectory(project)
    run = directory.new_run()
    with pytest.raises(InputError, match="has no model.keras") as refused:
        find_model(run.run_id, None, directory)
    assert f"--resume {run.run_id}" in refused.value.remedy
    run.model.write_bytes(b"")
    run.save_manifest(manifest_of() | {"job": {"path": "job.yaml"}})
    for name in (run.run_id, run.run_id[:10], "latest"):
        assert find_model(name, None, directory) == (run.model.resolve(), project / "job.yaml")
    other = project / "open.yaml"
    assert find_model("latest", other, directory) == (run.model.resolve(), other)


def info(*outputs: OutputInfo) -> ModelInfo:
    return ModelInfo("model.keras", (8,), (), 1, 1, "", outputs=outputs)


@pytest.mark.parametrize(
    ("activation", "loss", "from_logits", "expected"),
    [
        ("softmax", "", False, (SOFTMAX, False)),
        ("sigmoid", "binary_crossentropy", False, (SIGMOID, False)),
        ("linear", "sparse_categorical_crossentropy", True, (SOFTMAX, True)),
        ("linear", "binary_crossentropy", True, (SIGMOID, True)),
        ("linear", "mean_squared_error", False, (VALUES, False)),
        ("", "", False, (VALUES, False)),
    ],
)
def test_rule_of_an_output(activation: str, loss: str, from_logits: bool, expected: tuple[str, bool]) -> None:
    (rule,) = build_rules(info(OutputInfo("", (4,), activation, loss, from_logits=from_logits)), CLASSES)
    assert (rule.kind, rule.from_logits) == expected


def test_each_output_has_fields_of_its_own() -> None:
    outputs = (OutputInfo("kind", (4,), "softmax", ""), OutputInfo("size", (1,), "linear", "mse"))
    rules = build_rules(info(*outputs), CLASSES)
    fields = [name for rule in rules for name in rule.fields]
    assert fields == ["kind.class", "kind.probability", "size.value"]
    assert [rule.kind for rule in build_rules(info(*outputs), SCORES)] == [VALUES, VALUES]
    assert build_rules(info(*outputs), EMBEDDINGS) == (ResultRule("", VALUES),)


def test_class_of_each_pixel_is_refused_with_the_way_to_all_scores() -> None:
    with pytest.raises(InputError, match="8×8×4") as refused:
        build_rules(info(OutputInfo("", (8, 8, 4), "softmax", "")), CLASSES)
    assert "--want scores" in refused.value.remedy


@pytest.mark.parametrize(
    ("architecture", "remedy"),
    [
        ('{"config": {"layers": [{"config": {"name": "pooled"}}]}}', "such as pooled"),
        ('{"config": {"units": 3}}', "only models with a graph"),
    ],
)
def test_layer_that_the_model_does_not_have_is_refused(
    tmp_path: Path, architecture: str, remedy: str
) -> None:
    (tmp_path / "model.json").write_text(architecture)
    file = StoredFile("a" * 64 + ".json", tmp_path / "model.json", 0, 0)
    with pytest.raises(InputError, match="has no layer 'pool'") as refused:
        check_layer("pool", SerializedModel(info(), file, file))
    assert remedy in refused.value.remedy
