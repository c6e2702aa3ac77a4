"""What `init` takes from its options, and the job.yaml that it writes, with the reasons in comments."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.documents import parse_document
from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo, PictureSizes, TableSchema
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo, OwnCompile, ScriptFit
from csdctl.worker.protocol.recipe import LossTerm, Recipe, ReduceOnPlateau
from csdctl.workflows.init import init
from csdctl.workflows.init.init import InitRequest, Looks, Sources, parse_sources

SOURCES = Sources("model.py:build", {"path": "data/train"})
SPARSE = "sparse_categorical_crossentropy"
ADAM = OwnCompile("Adam", 1e-5, metrics=("accuracy",))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("model.py", "own_layers.py", "data.py"):
        (tmp_path / name).touch()
    (tmp_path / "model.py").write_text("from own_layers import Scale\n")
    (tmp_path / "jobs").mkdir()
    return tmp_path


def test_paths_are_relative_to_the_job_file_and_imports_are_found(project: Path) -> None:
    function = f"{project}/data.py:load"
    sources = parse_sources(
        InitRequest(project / "job.yaml", f"{project}/model.py:build", function, f"{function}:{project}/jobs")
    )
    assert (sources.model, sources.code) == ("model.py:build", ("own_layers.py",))
    assert sources.public == {"path": "data.py", "function": "data.py:load"}
    assert sources.validation == {"path": "jobs", "function": "data.py:load"}
    below = parse_sources(InitRequest(project / "jobs/job.yaml", f"{project}/model.py:build", str(project)))
    assert (below.model, below.public) == (f"{project}/model.py:build", {"path": str(project)})
    # A shell has written the home of this machine, and the home of the node is meant.
    for given, expected in ((f"{Path.home()}/private", "~/private"), ("/data/p", "/data/p")):
        request = InitRequest(project / "job.yaml", "keras.applications:X", str(project), private=given)
        assert parse_sources(request).private == expected


def test_functions_of_a_script_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("import layers_of_a\nmodel.fit(x)")
    (tmp_path / "layers_of_a.py").touch()
    functions = tmp_path / "a_functions.py"

    def refuse(self: object, sources: Sources) -> None:
        assert sources == Sources(
            "a_functions.py:build",
            {"path": functions.name, "function": "a_functions.py:training_data"},
            {"path": functions.name, "function": "a_functions.py:validation_data"},
            code=("layers_of_a.py",),
            recipe={"epochs": 3},
        )
        raise InputError("no data", remedy="fix data.public")

    monkeypatch.setattr(init._Looking, "record", lambda self, script: ScriptFit({"epochs": 3}, True))
    monkeypatch.setattr(init._Looking, "look", refuse)
    request = InitRequest(tmp_path / "job.yaml", script=tmp_path / "a.py", options=("--n", "5"))
    for _ in range(2):
        with pytest.raises(InputError, match=r"fix data.public; .*job.yaml does not exist yet: see `csdctl"):
            init.init_job(request, tmp_path, print, print)
    text = functions.read_text()
    assert f'run_to_fit("{tmp_path}/a.py", ["--n", "5"], globals(), "' in text
    assert hashlib.sha256((tmp_path / "a.py").read_bytes()).hexdigest() in text
    assert "\nimport layers_of_a  #" in text
    functions.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        init.init_job(request, tmp_path, print, print)
    assert not request.output.exists()


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ("history = model.fit(x, epochs=1)", True),
        ("base_model.fit(x)", True),
        ("def f():\n    model.fit(x, epochs=1)", False),
        ("scaler.fit(x)", False),
    ],
)
def test_model_of_a_file_that_trains_when_imported_is_refused(project: Path, text: str, trains: bool) -> None:
    (project / "model.py").write_text(text)
    request = InitRequest(project / "job.yaml", f"{project}/model.py:build", str(project))
    with pytest.raises(InputError, match="trains a model when") if trains else nullcontext():
        parse_sources(request)


def model(
    shape: tuple[int, ...] = (10,), last: str = "softmax", loss: str = SPARSE, **more: Any
) -> ModelInfo:
    outputs = (OutputInfo("", shape, last, loss),)
    return ModelInfo("model.py:build", {"": (28, 28, 1)}, 1234, 1200, outputs=outputs, **more)


def data(labels: tuple[str, tuple[int, ...], int] = ("int32", (), 9), dtype: str = "uint8") -> DataLook:
    label_dtype, shape, largest = labels
    largest_of = {"": largest} if label_dtype.startswith("int") else {}
    info = DatasetInfo(
        path="",
        num_samples=500,
        sample_shape=(28, 28, 1),
        dtype=dtype,
        label_shape=shape,
        max_label=largest,
        fingerprint="",
        label_dtype=label_dtype,
        max_labels=largest_of,
    )
    return DataLook("npz", info, 60_000, False)


def class_folders(**changes: Any) -> DataLook:
    sizes = PictureSizes(("jpeg", "png"), (28, 28), (480, 640))
    counts = {"a b": 100, "yes": 500}
    look = replace(data(), format="class folders", num_samples=600, class_counts=counts, pictures=sizes)
    return replace(look, info=replace(look.info, **changes))


def parse(text: str) -> Job:
    return parse_document(text, Job, name="job.yaml")


def written(looks: Looks, sources: Sources = SOURCES) -> tuple[str, Job]:
    text = init.render_job(sources, looks)
    assert max(map(len, text.splitlines())) <= 112
    return text, parse(text)


class TestRecipe:
    def test_compiled_model_leaves_nothing_to_the_recipe_but_epochs(self) -> None:
        text, job = written(Looks(model(compiled=replace(ADAM, schedule="CosineDecay")), data()))
        assert job.recipe == Recipe(epochs=10)
        assert "those of compile(): Adam, CosineDecay from 1e-05" in text
        assert f"# loss: {SPARSE}  # of compile()" in text
        assert "# metrics: [accuracy]  # of compile()" in text

    def test_keys_from_a_script_are_written_with_the_rate_that_keeps_them(self) -> None:
        recipe = {"epochs": 3, "reduce_on_plateau": {"patience": 2, "min_factor": 0.01}}
        text, job = written(Looks(model(compiled=ADAM), data()), replace(SOURCES, recipe=recipe))
        assert job.recipe.epochs == 3
        assert job.recipe.reduce_on_plateau == ReduceOnPlateau(patience=2, min_factor=0.01)
        assert "\n  # max_learning_rate: 1e-05" in text

    def test_model_that_is_not_compiled_gets_placeholders_that_say_so(self) -> None:
        text, job = written(Looks(model(), data()))
        assert (job.recipe.learning_rate, job.recipe.optimizer, job.recipe.losses) == (
            0.001,
            "adam",
            {"": LossTerm(SPARSE)},
        )
        assert "learning_rate: 0.001  # a placeholder: the model is not compiled" in text

    def test_compiled_loss_that_does_not_know_of_logits_is_mended(self) -> None:
        text, job = written(Looks(model(last="linear", compiled=ADAM), data()))
        assert (job.recipe.losses, job.recipe.from_logits) == ({"": LossTerm(SPARSE)}, True)
        assert "without from_logits=True" in text

    @pytest.mark.parametrize(
        ("shape", "last", "labels", "expected"),
        [
            ((10,), "softmax", ("int32", (), 9), (SPARSE, False)),
            ((10,), "linear", ("int32", (), 9), (SPARSE, True)),
            ((10,), "softmax", ("float32", (10,), -1), ("categorical_crossentropy", False)),
            ((1,), "sigmoid", ("int32", (), 1), ("binary_crossentropy", False)),
            ((1,), "linear", ("float32", (), -1), ("mean_squared_error", False)),
            ((1,), "linear", ("int32", (), 70), ("mean_squared_error", False)),
            ((8, 8, 3), "softmax", ("int32", (8, 8, 1), 2), (SPARSE, False)),
        ],
    )
    def test_loss_follows_from_labels_and_last_layer(
        self, shape: tuple[int, ...], last: str, labels: Any, expected: tuple[str, bool | None]
    ) -> None:
        looks = Looks(model(shape, last), data(labels))
        choice = init.choose_loss(looks)
        assert choice
        assert (choice.name, choice.from_logits) == expected
        assert written(looks)[1].recipe.from_logits is bool(expected[1])

    def test_several_outputs_that_are_not_compiled_need_losses_by_the_user(self) -> None:
        outputs = (OutputInfo("kind", (3,), "linear", ""), OutputInfo("size", (1,), "linear", ""))
        assert init.choose_loss(Looks(replace(model(), outputs=outputs), data())) is None


class TestData:
    def test_class_folders_say_sizes_classes_and_that_not_all_was_seen(self) -> None:
        text = " ".join(written(Looks(model(), class_folders()))[0].replace("\n  #", "").split())
        assert "class folders: 600 files in 2 classes, 100 to 500 files each, jpeg and png, 28×28 to" in text
        assert "500 inspected" in text

    def test_pictures_for_a_model_of_any_size_get_a_shape(self) -> None:
        any_size = replace(model(), inputs={"": (0, 0, 3)})
        folders = class_folders(sample_shape=(96, 64, 3))
        assert written(Looks(any_size, folders))[1].data.image.shape == (96, 64, 3)

    @pytest.mark.parametrize(
        ("layers", "recipe", "expected"),
        [((), {}, (0, 1)), (("rescaling (Rescaling)",), {}, None), ((), {"epochs": 1}, None)],
    )
    def test_input_range_follows_from_layers(
        self, layers: tuple[str, ...], recipe: dict[str, Any], expected: tuple[int, int] | None
    ) -> None:
        looks = Looks(replace(model(), scaling_layers=layers), data(dtype="uint8"))
        sources = replace(SOURCES, recipe=recipe)
        assert written(looks, sources)[1].data.input_range == expected
        assert "input_range" not in written(replace(looks, public=data(dtype="float32")), sources)[0]

    def test_columns_that_were_chosen_are_written(self) -> None:
        table = replace(data(), format="csv", table=TableSchema(("target",), "", ("no. 1",)))
        job = written(Looks(model(), table))[1]
        assert job.data.csv == TableSchema(("target",), dropped=("no. 1",))


class TestText:
    @pytest.mark.parametrize("name", ["a b", "null", "12", "1e5", "#x", "a: b", "ä", '"', "~"])
    def test_any_name_survives(self, name: str) -> None:
        sources = replace(SOURCES, public={"path": name}, model_args={name: [name, 1e-05, None, True]})
        for job in (written(Looks(model(), data()), sources)[1], parse(init.render_draft(sources))):
            assert str(job.data.public.path) == name
            assert job.model_args == {name: [name, 1e-05, None, True]}

    def test_comment_stays_a_comment(self) -> None:
        layers = ("x\nrecipe: {epochs: 99}\x1b[2J (Rescaling)",)
        text, job = written(Looks(replace(model(), scaling_layers=layers), data()))
        assert job.recipe.epochs == 10
        assert "\x1b" not in text
