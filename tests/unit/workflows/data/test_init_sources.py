"""What `init` takes from its options, and finds in files without running them."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.worker.protocol.datasets import FoundData
from csdctl.workflows.data.init_sources import (
    DataReference,
    choose_model,
    choose_public,
    choose_validation,
    find_models,
    parse_data,
    parse_model,
    parse_private,
)

IMPORTS = "import keras\nfrom keras import Model, layers\nraise SystemExit('nobody runs this file')\n"


def functions_in(directory: Path, code: str) -> list[str]:
    (directory / "model.py").write_text(IMPORTS + code)
    return find_models(directory)


class TestModels:
    @pytest.mark.parametrize(
        "code",
        [
            "def build():\n    return keras.Sequential([])\n",
            "def build(width=8, *, depth=2):\n    model = Model(1, 2)\n    return model\n",
            "def build() -> keras.Model:\n    return other()\n",
            'def build() -> "keras.Model":\n    return other()\n',
            "def build():\n    return keras.applications.MobileNetV2(weights=None)\n",
            "class Net(keras.Model):\n    pass\n\ndef build():\n    return Net()\n",
            "def _inner():\n    return Model(1, 2)\n\ndef build():\n    return _inner()\n",
            "def build():\n    if keras:\n        return Model(1, 2)\n    return None\n",
            "def build():\n    net = hub.Classifier()\n    net.compile('sgd')\n    return net\n",
        ],
    )
    def test_function_that_returns_a_model_is_found(self, tmp_path: Path, code: str) -> None:
        assert functions_in(tmp_path, code) == ["model.py:build"]

    @pytest.mark.parametrize(
        "code",
        [
            "def load(path='x'):\n    return keras.utils.image_dataset_from_directory(path)\n",
            "def build(width):\n    return Model(1, 2)\n",
            "def outer():\n    def build():\n        return Model(1, 2)\n    return 3\n",
            "def build():\n    text = re.compile('a')\n    return text\n",
            "def build(:\n",
        ],
    )
    def test_other_functions_are_not(self, tmp_path: Path, code: str) -> None:
        assert functions_in(tmp_path, code) == []

    def test_file_without_keras_is_not_looked_into(self, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text("def build():\n    return Model(1, 2)\n")
        assert find_models(tmp_path) == []

    def test_several_are_listed_with_the_option(self, tmp_path: Path) -> None:
        (tmp_path / "a.keras").touch()
        found = functions_in(tmp_path, "def build() -> Model:\n    return f()\n")
        with pytest.raises(InputError) as caught:
            choose_model(found)
        assert caught.value.message == "several models were found here: a.keras, model.py:build"
        assert caught.value.remedy == "choose one, such as --model a.keras"

    def test_none_names_the_forms(self) -> None:
        with pytest.raises(InputError) as caught:
            choose_model([])
        assert "--model FILE.py:FUNCTION" in caught.value.remedy

    @pytest.mark.parametrize("text", ["model.h5", "build", "model.py", "model.py:"])
    def test_invalid_reference_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(InputError, match="is not a valid reference"):
            parse_model(text, tmp_path)

    def test_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"--model: .*model.py does not exist"):
            parse_model(f"{tmp_path}/model.py:build", tmp_path)

    def test_path_is_relative_to_the_job_file(self, tmp_path: Path) -> None:
        (tmp_path / "jobs").mkdir()
        (tmp_path / "model.py").touch()
        assert parse_model(f"{tmp_path}/model.py:build", tmp_path) == "model.py:build"
        assert parse_model(f"{tmp_path}/model.py:build", tmp_path / "jobs") == f"{tmp_path}/model.py:build"


class TestData:
    def test_function_reads_a_path_or_its_own_file(self, tmp_path: Path) -> None:
        (tmp_path / "data.py").touch()
        (tmp_path / "train").mkdir()
        alone = parse_data("--public", f"{tmp_path}/data.py:load", tmp_path)
        assert alone == DataReference("data.py", "data.py:load")
        with_path = parse_data("--public", f"{tmp_path}/data.py:load:{tmp_path}/train", tmp_path)
        assert with_path == DataReference("train", "data.py:load")

    def test_missing_path_names_its_option(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"--validation: .*val does not exist"):
            parse_data("--validation", f"{tmp_path}/val", tmp_path)

    def test_home_that_a_shell_has_written_out_is_that_of_the_node(self) -> None:
        assert parse_private(f"{Path.home()}/private") == "~/private"
        assert parse_private("/data/private") == "/data/private"

    def test_only_training_data_is_taken_and_validation_before_tests(self) -> None:
        found = FoundData(("data/train",), ("data/test", "data/val"))
        assert (choose_public(found), choose_validation(found)) == ("data/train", "data/val")
        assert choose_validation(FoundData((), ("a/val", "b/val"))) == ""

    def test_several_are_listed_with_the_option(self) -> None:
        with pytest.raises(InputError) as caught:
            choose_public(FoundData(("cats", "dogs"), ()))
        assert caught.value.message == "several data sets were found here: cats, dogs"
        assert caught.value.remedy == "choose one, such as --public cats"
