"""What a job's own code imports, and on which machines it is needed."""

from pathlib import Path

import pytest

from csdctl.job.imports import Needed, describe_missing, list_imports, remedy_of, required_modules
from csdctl.job.model import load_job


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import scipy.ndimage as nd, os", {"scipy"}),
        ("from sklearn.metrics import auc\nimport numpy, keras, tensorflow as tf", {"sklearn"}),
        ("def f():\n    import cv2\n    return cv2", {"cv2"}),
        ("class A:\n    def f(self):\n        from PIL import Image", {"PIL"}),
        ("from . import layers\nfrom .layers import A", set()),
        ("try:\n    import cv2\nexcept ImportError:\n    import imageio", set()),
        ("try:\n    import cv2\nexcept (OSError, ModuleNotFoundError):\n    cv2 = None", set()),
        ("try:\n    import cv2\nexcept:\n    pass\nfinally:\n    import scipy", {"scipy"}),
        ("try:\n    import cv2\nexcept ValueError:\n    pass", {"cv2"}),
        ("try:\n    import cv2\nexcept ImportError:\n    pass\nimport cv2", {"cv2"}),
        ("with contextlib.suppress(ImportError):\n    import cv2", set()),
        ("with suppress(OSError):\n    import cv2", {"cv2"}),
        ("if TYPE_CHECKING:\n    import pandas\nelse:\n    import polars", {"polars"}),
        ("if typing.TYPE_CHECKING:\n    import pandas", set()),
        ("if __name__ == '__main__':\n    import matplotlib", set()),
        ("if fast:\n    import numba", {"numba"}),
        ("this is no Python", set()),
    ],
)
def test_modules_that_a_file_cannot_do_without(code: str, modules: set[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(code)
    assert required_modules(tmp_path / "own.py") == modules


JOB = """\
model: model.py:build
code: [layers.py, package]
data:
  public: {path: data, function: read.py:load}
  private: {path: /data/private, function: private.py:load}
  augment: augment.py:flip
recipe: {epochs: 1, learning_rate: 0.1}
"""
FILES = {
    "model.py": "import layers, beside, package, of_model",
    "layers.py": "import of_layers",
    "package/inner.py": "import of_package",
    "read.py": "import beside, of_reading",
    "private.py": "import layers, of_private",
    "augment.py": "import package, of_augment",
    "beside.py": "import of_beside",
}


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name, code in {**FILES, "job.yaml": JOB}.items():
        (tmp_path / name).write_text(code)
    return tmp_path / "job.yaml"


def names(needed: tuple[Needed, ...]) -> set[str]:
    return {need.module for need in needed}


def test_nodes_need_what_the_code_imports_that_they_get(job_path: Path) -> None:
    job = load_job(job_path)
    sent = {"of_private", "of_layers", "of_augment", "of_package"}
    for_model = {"of_model", "beside"}
    assert names(list_imports(job, False).nodes) == sent
    assert names(list_imports(job, True).nodes) == sent | for_model
    # Who names `code` wants it to be sent.
    assert list_imports(job, None) == list_imports(job, True)


@pytest.mark.parametrize(
    ("model", "recipe", "is_certain"),
    [
        ("import scipy\ndef build(): ...", "", False),
        ("import scipy\nclass Own(keras.layers.Layer): ...", "", True),
        ("import scipy\ndef build(): ...", ", loss: 'model.py:own'", True),
        ("import scipy\ndef build(): ...", ", loss: 'loss.py:own'", True),
    ],
)
def test_model_that_was_not_built_needs_its_code_if_it_has_classes_or_other_files(
    model: str, recipe: str, is_certain: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "loss.py").write_text("")
    (tmp_path / "job.yaml").write_text(
        "model: model.py:build\ndata: {public: {path: data}}\n"
        f"recipe: {{epochs: 1, learning_rate: 0.1{recipe}}}\n"
    )
    found = list_imports(load_job(tmp_path / "job.yaml"), None)
    assert (names(found.nodes), names(found.perhaps)) == (
        ({"scipy"}, set()) if is_certain else (set(), {"scipy"})
    )


def test_host_needs_what_all_files_import_but_what_lies_beside_the_model(job_path: Path) -> None:
    found = list_imports(load_job(job_path), None).host
    of_files = {"of_model", "of_layers", "of_package", "of_augment", "of_reading", "of_private"}
    # A data function runs from the store, where nothing lies beside it.
    assert names(found) == of_files | {"beside"}
    assert [need.importer for need in found if need.module == "beside"] == ["read.py"]


def test_sentence_and_remedy_name_module_file_and_package() -> None:
    missing = [Needed("cv2", "augment.py"), Needed("scipy", "model.py"), Needed("helper", "read.py", True)]
    assert describe_missing(missing) == (
        "has no cv2, which augment.py imports, and no scipy, which model.py imports, "
        "and no helper, which read.py imports"
    )
    assert remedy_of(missing, "/opt/py thon") == (
        "add helper to `code` in job.yaml; "
        "install it there: `'/opt/py thon' -m pip install opencv-python-headless scipy`"
    )
