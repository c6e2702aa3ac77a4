"""What `init` takes from its options, and the job.yaml that it writes, with the reasons in comments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from csdctl.documents import parse_document
from csdctl.errors import InputError
from csdctl.job.model import Job
from csdctl.worker.protocol.datasets import DataLook, DatasetInfo, PictureSizes, TableSchema
from csdctl.worker.protocol.model_info import ModelInfo, OutputInfo, OwnCompile
from csdctl.worker.protocol.recipe import LossTerm, Recipe, ReduceOnPlateau
from csdctl.workflows.init.init import (
    InitRequest,
    Looks,
    Sources,
    _Looking,
    choose_application_args,
    choose_losses,
    init_job,
    parse_sources,
    render_draft,
    render_job,
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("model.py", "own_layers.py", "data.py"):
        (tmp_path / name).touch()
    (tmp_path / "model.py").write_text("from own_layers import Scale\n")
    (tmp_path / "jobs").mkdir()
    return tmp_path


def test_paths_are_relative_to_the_job_file_and_imports_are_found(project: Path) -> None:
    function = f"{project}/data.py:load"
    found = parse_sources(
        InitRequest(project / "job.yaml", f"{project}/model.py:build", function, f"{function}:{project}/jobs")
    )
    assert (found.model, found.code) == ("model.py:build", ("own_layers.py",))
    assert found.public == {"path": "data.py", "function": "data.py:load"}
    assert found.validation == {"path": "jobs", "function": "data.py:load"}
    below = parse_sources(InitRequest(project / "jobs/job.yaml", f"{project}/model.py:build", str(project)))
    assert (below.model, below.public) == (f"{project}/model.py:build", {"path": str(project)})
    # A home that a shell has written out is that of the node.
    for given, expected in ((f"{Path.home()}/private", "~/private"), ("/data/p", "/data/p")):
        request = InitRequest(project / "job.yaml", "keras.applications:X", str(project), private=given)
        assert parse_sources(request).private == expected


def test_functions_of_a_script_stay_and_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(
        "import keras\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('adam', 'mse')\n"
        "model.fit([[1, 2]], [1], epochs=1)\n"
    )
    functions = tmp_path / "a_functions.py"

    def refuse(self: object, sources: object) -> None:
        raise InputError(f"{functions} fails")

    monkeypatch.setattr(_Looking, "look", refuse)
    request = InitRequest(tmp_path / "job.yaml", script=tmp_path / "a.py")
    for _ in range(2):
        with pytest.raises(InputError, match=f"{functions} fails"):
            init_job(request, tmp_path, print, print)
        assert "def build" in functions.read_text()
    functions.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        init_job(request, tmp_path, print, print)
    assert not request.output.exists()


SOURCES = Sources("model.py:build", {"path": "data/train"})
SPARSE = "sparse_categorical_crossentropy"
ADAM = OwnCompile("Adam", 1e-5, metrics=("accuracy",))


def model(
    shape: tuple[int, ...] = (10,), last: str = "softmax", loss: str = SPARSE, **more: Any
) -> ModelInfo:
    outputs = (OutputInfo("", shape, last, loss),)
    return ModelInfo("model.py:build", {"": (28, 28, 1)}, 1234, 1200, outputs=outputs, **more)


def data(labels: tuple[str, tuple[int, ...], int] = ("int32", (), 9), dtype: str = "uint8") -> DataLook:
    label_dtype, shape, largest = labels
    largest_of = {"": largest} if label_dtype.startswith("int") else {}
    info = DatasetInfo("", 500, (28, 28, 1), dtype, shape, largest, "")
    info = replace(info, label_dtype=label_dtype, max_labels=largest_of)
    return DataLook("npz", info, 60_000, False)


FOLDERS = replace(
    data(),
    format="class folders",
    num_samples=600,
    class_counts={"a b": 100, "yes": 500},
    pictures=PictureSizes(("jpeg", "png"), (28, 28), (480, 640)),
)


def parse(text: str) -> Job:
    return parse_document(text, Job, name="job.yaml")


def written(looks: Looks, sources: Sources = SOURCES) -> tuple[str, Job]:
    text = render_job(sources, looks)
    assert max(map(len, text.splitlines())) <= 112
    return text, parse(text)


class TestRecipe:
    def test_compiled_model_leaves_nothing_to_the_recipe_but_epochs(self) -> None:
        text, job = written(Looks(model(compiled=replace(ADAM, schedule="CosineDecay")), data()))
        assert job.recipe == Recipe(epochs=10)
        assert "those of compile(): Adam, CosineDecay from 1e-05" in text
        assert f"# loss: {SPARSE}  # of compile()" in text
        assert "# metrics: [accuracy]  # of compile()" in text

    def test_what_a_script_leaves_open_is_a_comment_and_min_lr_a_factor(self) -> None:
        plateau = {"patience": 2, "min_lr": 1e-7}
        recipe = {"epochs": 3, "# class_weight": "not converted, line 9", "reduce_on_plateau": plateau}
        lifted = replace(SOURCES, recipe=recipe)
        text, job = written(Looks(model(compiled=ADAM), data()), lifted)
        assert job.recipe.reduce_on_plateau == ReduceOnPlateau(patience=2, min_factor=0.01)
        assert "\n  # class_weight: not converted, line 9\n" in text
        assert "\n  # max_learning_rate: 1e-05" in text

    def test_model_that_is_not_compiled_gets_placeholders_that_say_so(self) -> None:
        text, job = written(Looks(model(), data()))
        assert (job.recipe.learning_rate, job.recipe.optimizer, job.recipe.loss) == (
            0.001,
            "adam",
            {"": LossTerm(SPARSE)},
        )
        assert "learning_rate: 0.001  # a placeholder: the model is not compiled" in text

    def test_compiled_loss_that_does_not_know_of_logits_is_mended(self) -> None:
        text, job = written(Looks(model(last="linear", compiled=ADAM), data()))
        assert (job.recipe.loss, job.recipe.from_logits) == ({"": LossTerm(SPARSE)}, True)
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
        (choice,) = choose_losses(looks).values()
        assert (choice.name, choice.from_logits) == expected
        assert written(looks)[1].recipe.from_logits is bool(expected[1])

    def test_each_output_gets_a_loss(self) -> None:
        outputs = (OutputInfo("kind", (3,), "linear", ""), OutputInfo("size", (1,), "linear", ""))
        dtype = '[["kind","int32",[]],["size","float32",[]]]'
        info = replace(data().info, label_dtype=dtype, label_shape=(), max_labels={"kind": 2})
        _, job = written(Looks(replace(model(), outputs=outputs), replace(data(), info=info)))
        assert job.recipe.loss["size"] == LossTerm("mean_squared_error")
        assert job.recipe.loss["kind"].args == {"from_logits": True}


class TestData:
    def test_class_folders_say_sizes_classes_and_that_not_all_was_seen(self) -> None:
        text = " ".join(written(Looks(model(), FOLDERS))[0].replace("\n  #", "").split())
        assert "class folders: 600 files in 2 classes, 100 to 500 files each, jpeg and png, 28×28 to" in text
        assert "500 inspected" in text

    def test_pictures_for_a_model_of_any_size_get_a_shape(self) -> None:
        any_size = replace(model(), inputs={"": (0, 0, 3)})
        same = replace(FOLDERS, info=replace(FOLDERS.info, sample_shape=(96, 64, 3)))
        assert written(Looks(any_size, same))[1].data.image.shape == (96, 64, 3)

    @pytest.mark.parametrize(
        ("name", "arguments", "layers", "dtype", "expected"),
        [
            ("model.py:build", {}, (), "uint8", (0, 1)),
            ("model.py:build", {}, ("rescaling (Rescaling)",), "uint8", None),
            ("keras.applications:MobileNetV2", {"classes": 9}, (), "uint8", (-1, 1)),
            ("keras.applications:ResNet50V2", {"classes": 9}, (), "uint8", (-1, 1)),
            ("keras.applications:MobileNetV2", {"weights": None}, (), "uint8", (0, 1)),
        ],
    )
    def test_input_range_follows_from_layers_and_weights(
        self, name: str, arguments: dict[str, Any], layers: tuple[str, ...], dtype: str, expected: Any
    ) -> None:
        sources = replace(SOURCES, model=name, model_args=arguments)
        looks = Looks(replace(model(), scaling_layers=layers), data(dtype=dtype))
        assert written(looks, sources)[1].data.input_range == expected
        assert "input_range" not in written(replace(looks, public=data(dtype="float32")), sources)[0]

    def test_columns_that_were_chosen_are_written(self) -> None:
        table = replace(data(), format="csv", table=TableSchema(("target",), "", ("no. 1",)))
        job = written(Looks(model(), table))[1]
        assert job.data.csv == TableSchema(("target",), drop=("no. 1",))


class TestText:
    @pytest.mark.parametrize("name", ["a b", "null", "12", "1e5", "#x", "a: b", "ä", '"', "~"])
    def test_any_name_survives(self, name: str) -> None:
        sources = replace(SOURCES, public={"path": name}, model_args={name: [name, 1e-05, None, True]})
        for job in (written(Looks(model(), data()), sources)[1], parse(render_draft(sources))):
            assert str(job.data.public.path) == name
            assert job.model_args == {name: [name, 1e-05, None, True]}

    def test_comment_stays_a_comment(self) -> None:
        layers = ("x\nrecipe: {epochs: 99}\x1b[2J (Rescaling)",)
        text, job = written(Looks(replace(model(), scaling_layers=layers), data()))
        assert job.recipe.epochs == 10
        assert "\x1b" not in text


def test_application_without_arguments_is_made_for_the_pictures() -> None:
    expected = {"input_shape": [224, 224, 3], "weights": None, "classes": 2}
    assert choose_application_args(FOLDERS) == expected
    small = replace(FOLDERS, pictures=PictureSizes(("png",), (28, 64), (28, 64)))
    assert choose_application_args(small) == expected | {"input_shape": [32, 64, 3]}
