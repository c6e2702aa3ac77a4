"""How job.yaml defines the reading of data; private data that overlaps with other data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import Job, find_imported, load_job
from csdctl.worker.protocol.datasets import ImageRule, RecordSchema, TableSchema

JOB = """\
model: keras.applications:MobileNetV2
data:
  public: {path: PUBLIC}
  private: {path: PRIVATE}
  validation: {path: VALIDATION}
MORErecipe: {epochs: 1, learning_rate: 0.1}
"""

Write = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> Write:
    def write(
        more: str = "", *, public: str = "pub", private: str = "/data/private", validation: str = "val"
    ) -> Job:
        text = JOB.replace("PUBLIC", public).replace("PRIVATE", private).replace("VALIDATION", validation)
        (tmp_path / "job.yaml").write_text(text.replace("MORE", f"  {more}\n" if more else ""))
        return load_job(tmp_path / "job.yaml")

    return write


class TestReading:
    def test_defaults_leave_everything_to_the_model(self, job: Write) -> None:
        reading = job().reading
        assert reading.picture == ImageRule(None, "stretch", 100_000_000)
        assert (reading.classes, reading.records, reading.function_files) == (None, None, ())

    def test_images_classes_and_features_are_read(self, job: Write) -> None:
        data = "image: {shape: [64, 48, 3], fit: pad, max_pixels: 1000}\n  classes: [cat, dog]"
        data += "\n  tfrecord: {image: img, label: cls, shape: [4, 4], dtype: float32}"
        reading = job(data).reading
        assert reading.picture == ImageRule((64, 48, 3), "pad", 1000)
        assert reading.classes == ("cat", "dog")
        assert reading.records == RecordSchema("img", "cls", (4, 4), "float32")

    def test_columns_of_tables_are_read(self, job: Write) -> None:
        assert job("csv: {label: price}").reading.table == TableSchema(("price",))
        table = job("csv: {label: [a, b], weight: w, drop: [id]}").reading.table
        assert table == TableSchema(("a", "b"), "w", ("id",))

    @pytest.mark.parametrize(
        ("data", "key"),
        [
            ("csv: {}", "csv.label"),
            ("csv: {label: []}", "csv.label"),
            ("csv: {label: ''}", "csv.label"),
            ("csv: {label: a, drop: [a]}", "csv"),
            ("csv: {label: a, weigth: b}", "csv.weigth`, did you mean `weight"),
            ("image: {shape: [64, 64]}", "image.shape"),
            ("image: {shape: [64, 64, 4]}", "image.shape"),
            ("image: {shape: [0, 64, 3]}", "image.shape"),
            ("image: {fit: squeeze}", "image.fit"),
            ("image: {max_pixels: 0}", "image.max_pixels"),
            ("image: {max_pixels: 1000000000}", "image.max_pixels"),
            ("classes: []", "classes"),
            ("classes: [cat, dog, cat]", "classes"),
            ("classes: [a/b]", "classes"),
            ("tfrecord: {image: x}", "tfrecord.label"),
            ("tfrecord: {image: x, label: y, dtype: float32}", "tfrecord"),
            ("tfrecord: {image: x, label: y, shape: []}", "tfrecord.shape"),
        ],
    )
    def test_impossible_value_is_refused_with_its_line(self, job: Write, data: str, key: str) -> None:
        with pytest.raises(InputError, match=rf"job\.yaml:6: .*`data\.{key}"):
            job(data)

    def test_function_is_made_absolute_and_its_content_counts(self, job: Write, tmp_path: Path) -> None:
        file = tmp_path / "my_data.py"
        file.write_text("def load(path): ...")
        loaded = job(private="/data, function: my_data.py:load")
        assert loaded.reading.private_function == f"{file}:load"
        assert loaded.reading.function_files == (file,)
        before = loaded.fingerprint()
        file.write_text("def load(path): return 1")
        assert loaded.fingerprint() != before

    @pytest.mark.parametrize("function", ["my_data.py:load", "my_model.py", "my_model.txt:load", "load"])
    def test_missing_function_is_refused(self, job: Write, tmp_path: Path, function: str) -> None:
        (tmp_path / "my_model.py").write_text("")
        with pytest.raises(InputError, match="was not found|is not a valid reference"):
            job(public=f"pub, function: '{function}'")


class TestPrivatePath:
    @pytest.mark.parametrize(
        ("private", "other"),
        [
            ("/srv/data", "/srv/data"),
            ("/srv/data", "/srv/data/"),
            ("/srv/data", "/srv/./data/train"),
            ("/srv/data/mine", "/srv/data"),
            ("/srv/data", "/srv/other/../data"),
            ("~/data", "~/data"),
            ("data", "data"),
            ("data/mine", "./data"),
        ],
    )
    def test_private_data_named_as_other_data_is_refused(self, job: Write, private: str, other: str) -> None:
        with pytest.raises(InputError, match=r"data\.public\.path .* overlap") as raised:
            job(private=private, public=other)
        assert raised.value.exit_code == 2
        with pytest.raises(InputError, match=r"data\.validation\.path .* overlap"):
            job(private=private, validation=other)

    def test_root_directory_is_refused(self, job: Write) -> None:
        with pytest.raises(InputError, match="overlap"):
            job(private="/")

    def test_public_link_to_the_private_path_is_refused(self, job: Write, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "pub").symlink_to(tmp_path / "mine")
        with pytest.raises(InputError, match="overlap"):
            job(private=str(tmp_path / "mine"))

    @pytest.mark.parametrize("private", ["/data/../etc", "..", "~/../other", "a/.."])
    def test_parent_reference_is_refused(self, job: Write, private: str) -> None:
        with pytest.raises(InputError, match=r"contains `\.\.`"):
            job(private=private)

    @pytest.mark.parametrize("private", ["/data/private2", "~/private", "private", "/data/priv"])
    def test_sibling_paths_are_accepted(self, job: Write, private: str) -> None:
        assert job(private=private, public="/data/private").private_path == private


def test_imported_code_is_found_through_modules_and_packages(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("import numpy\nfrom features import clean\n")
    (tmp_path / "features.py").write_text("def clean():\n    import package.inner\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("import data, words\nfrom . import other\n")
    (tmp_path / "words.py").write_text("this is no Python")
    (tmp_path / "model.py").write_text("import features\n")
    names = ("data.py", "features.py", "package", "words.py", "model.py")
    roots = [tmp_path / name for name in names]
    assert find_imported(roots[0], roots) == (roots[1], roots[2], roots[3])
    assert find_imported(roots[3], roots) == ()
