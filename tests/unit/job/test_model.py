"""job.yaml: model, recipe, how data is read; private data that overlaps with other data."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import HostData, Job, describe_job, find_imported, load_job
from csdctl.worker.protocol.datasets import ImageRule, RecordSchema, TableSchema
from csdctl.worker.protocol.recipe import LossTerm, Noise

JOB = """\
model: keras.applications:MobileNetV2
model_args: {input_shape: [64, 64, 3], classes: 10, weights: null}
data:
  public: {path: data/train, on: host}
  private: {path: ~/private}
  validation: {path: /srv/val}
recipe:
  epochs: 10
  learning_rate: 0.1
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*changes: tuple[str, str]) -> Path:
        text = JOB
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "job.yaml").write_text(text)
        return tmp_path / "job.yaml"

    return write


Write = Callable[..., Path]
MODEL = "keras.applications:MobileNetV2"
NOISE = "noise: {l2_norm_clip: 1.0, noise_multiplier: 8.0, delta: 1.0e-5}"
MODEL_LINES = f"{MODEL}\nmodel_args: {{input_shape: [64, 64, 3], classes: 10, weights: null}}"


def with_recipe(write: Write, line: str) -> Job:
    return load_job(write(("  epochs: 10\n", f"  epochs: 10\n  {line}\n")))


class TestPaths:
    def test_host_paths_are_absolute_and_private_ones_as_written(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = load_job(write())
        assert job.data.public.path == tmp_path / "data" / "train"
        assert job.data.validation == HostData(Path("/srv/val"))
        assert job.private_path == "~/private"
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert load_job(write(("data/train", "~/train"))).data.public.path == tmp_path / "home" / "train"
        changes = ("  private: {path: ~/private}\n", ""), ("  validation: {path: /srv/val}\n", "")
        job = load_job(write(*changes))
        assert (job.data.private, job.data.validation) == (None, None)


class TestStep:
    def test_file_of_the_step_is_part_of_the_code(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def build(): ...")
        (tmp_path / "loop.py").write_text("def step(model, batch): ...")
        without = load_job(write((MODEL_LINES, "mine.py:build")))
        job = load_job(write((MODEL_LINES, "mine.py:build\nstep: loop.py:step")))
        assert job.code_roots == (tmp_path / "mine.py", tmp_path / "loop.py")
        assert describe_job(job)["step"] == f"{tmp_path}/loop.py:step"
        assert job.fingerprint() != without.fingerprint()

    def test_step_of_a_model_that_no_function_builds_is_refused(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "loop.py").write_text("def step(model, batch): ...")
        with pytest.raises(InputError, match="`step` needs a function of yours that builds the model"):
            load_job(write(("data:\n", "step: loop.py:step\ndata:\n")))


class TestModelReferences:
    @pytest.mark.parametrize(
        ("file", "function"), [("model.keras", ""), ("my_model.py", ":build"), ("a:b/m.py", ":build")]
    )
    def test_model_file_is_made_absolute(
        self, write: Write, tmp_path: Path, file: str, function: str
    ) -> None:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        content = "def build(): ..." if function else "PK\x05\x06" + "\0" * 18  # an empty zip archive
        path.write_text(content)
        job = load_job(write((MODEL, f'"{file}{function}"')))
        assert (job.model, job.model_file) == (f"{path}{function}", path)

    @pytest.mark.parametrize(
        "name",
        [
            *("MobileNetV2", "model.h5", "my_model.py:", "my_model.py:a.b", "a.txt:build"),
            *("keras.applications:__class__", "keras.applications:ResNet50;x"),
        ],
    )
    def test_invalid_reference_is_refused(self, write: Write, tmp_path: Path, name: str) -> None:
        (tmp_path / "my_model.py").write_text("")
        with pytest.raises(InputError, match="is not a valid reference") as raised:
            load_job(write((MODEL, f'"{name}"')))
        assert "PATH.py:FUNCTION" in raised.value.remedy

    @pytest.mark.parametrize(
        "name", ["~nobody-here/m.keras", "$HOME/m.keras", "-m.keras", f"{'x' * 300}.keras", "../m.py:build"]
    )
    def test_path_is_taken_as_it_is_written(self, write: Write, name: str) -> None:
        with pytest.raises(InputError, match="does not exist|cannot be used"):
            load_job(write((MODEL, name)))

    @pytest.mark.parametrize("name", ["link.keras", "link.py:build"])
    def test_link_to_another_kind_of_file_is_refused(self, write: Write, tmp_path: Path, name: str) -> None:
        (tmp_path / "key").write_text("secret")
        (tmp_path / name.partition(":")[0]).symlink_to(tmp_path / "key")
        with pytest.raises(InputError, match="is a link to"):
            load_job(write((MODEL, name)))


class TestFingerprint:
    @pytest.mark.parametrize(
        "change",
        [
            ("MobileNetV2", "MobileNetV3Small"),
            ("epochs: 10", "epochs: 11"),
            ("data/train", "data/other"),
            ("~/private", "~/other"),
            ("data:\n", "data:\n  input_range: [-1, 1]\n"),
            ("data:\n", "data:\n  image: {fit: crop}\n"),
            ("data:\n", "data:\n  tfrecord: {image: i, label: l}\n"),
            ("weights: null", "alpha: 0.5"),
            ("epochs: 10", "epochs: 10\n  early_stopping: {patience: 4}"),
            ("{path: ~/private}", f"{{path: ~/private, {NOISE}}}"),
        ],
    )
    def test_fingerprint_changes_with_any_input(self, write: Write, change: tuple[str, str]) -> None:
        before, again, after = load_job(write()), load_job(write()), load_job(write(change))
        assert before.fingerprint() == again.fingerprint() != after.fingerprint()
        assert describe_job(before) == describe_job(again) != describe_job(after)

    def test_fingerprint_changes_with_the_content_of_other_code(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        for name in ("parts/part.py", "loss.py"):
            (tmp_path / name).write_text("def f(): return 1")
        job = load_job(
            write(("data:\n", "code: [parts]\ndata:\n"), ("  epochs", "  loss: loss.py:f\n  epochs"))
        )
        before = job.fingerprint()
        for name in ("parts/part.py", "loss.py"):
            (tmp_path / name).write_text("def f(): return 2")
            assert job.fingerprint() != before
            before = job.fingerprint()


class TestRecipe:
    def test_loss_is_a_name_or_has_arguments_or_is_given_by_output(self, write: Write) -> None:
        assert with_recipe(write, "loss: mse").recipe.losses == {"": LossTerm("mse")}
        with_arguments = "loss: {name: categorical_crossentropy, label_smoothing: 0.1, weight: 2}"
        expected = LossTerm("categorical_crossentropy", {"label_smoothing": 0.1}, 2.0)
        assert with_recipe(write, with_arguments).recipe.losses == {"": expected}
        reduced = "loss: {name: mse, reduction: mean_with_sample_weight}"  # no output is meant, called name
        expected = LossTerm("mse", {"reduction": "mean_with_sample_weight"})
        assert with_recipe(write, reduced).recipe.losses == {"": expected}
        of_two = with_recipe(write, "loss: {kind: mse, size: {name: mae, weight: 0.5}}").recipe
        assert of_two.losses == {"kind": LossTerm("mse"), "size": LossTerm("mae", {}, 0.5)}

    def test_limits_decay_and_average_become_arguments_of_the_optimizer(self, write: Write) -> None:
        recipe = with_recipe(write, "momentum: 0.9\n  optimizer_args: {nesterov: true}").recipe
        assert recipe.optimizer_args == {"momentum": 0.9, "nesterov": True}
        lines = "clip: {global_norm: 1.0}\n  weight_decay: 0.01\n  ema: 0.99\n  accumulation_steps: 4"
        assert with_recipe(write, lines).recipe.optimizer_args == {
            "global_clipnorm": 1.0,
            "weight_decay": 0.01,
            "use_ema": True,
            "ema_momentum": 0.99,
            "gradient_accumulation_steps": 4,
        }

    def test_schedule_takes_the_place_of_the_learning_rate(self, write: Write) -> None:
        line = "schedule: {name: CosineDecay, initial_learning_rate: 0.1, decay_steps: 100}"
        with pytest.raises(InputError, match="schedule takes the place of learning_rate"):
            with_recipe(write, line)
        recipe = load_job(write(("learning_rate: 0.1", line))).recipe
        assert json.loads(recipe.schedule)["config"] == {"initial_learning_rate": 0.1, "decay_steps": 100}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        *((f"reference_batch: {value}", "recipe.reference_batch") for value in (0, -256, 2.5)),
        *((f"warmup_epochs: {value}", "recipe.warmup_epochs") for value in ("-1", ".inf", ".nan")),
        *((f"momentum: {value}", "recipe.momentum") for value in ("1.0", "-0.1", ".nan")),
        *((f"clip: {value}", "recipe.clip") for value in ("{}", "{norm: -1}", "{norm: 1, value: 1}")),
        *(("seed: -1", "recipe.seed"), ("from_logits: maybe", "recipe.from_logits")),
        ("csv: {}", "data.csv.label"),
        ("csv: {label: []}", "data.csv.label"),
        ("csv: {label: a, drop: [a]}", "data.csv"),
        ("image: {shape: [64, 64]}", "data.image.shape"),
        ("image: {shape: [64, 64, 4]}", "data.image.shape"),
        ("image: {fit: squeeze}", "data.image.fit"),
        ("image: {max_pixels: 1000000000}", "data.image.max_pixels"),
        ("classes: [cat, dog, cat]", "data.classes"),
        ("classes: [a/b]", "data.classes"),
        ("tfrecord: {image: x}", "data.tfrecord.label"),
        ("tfrecord: {image: x, label: y, dtype: float32}", "data.tfrecord"),
    ],
)
def test_impossible_value_is_refused_with_its_line(write: Write, line: str, key: str) -> None:
    before, number = ("data:\n", 4) if key.startswith("data") else ("  epochs: 10\n", 9)
    with pytest.raises(InputError, match=rf"job\.yaml:{number}: (key )?`{key}[`.]"):
        load_job(write((before, f"{before}  {line}\n")))


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("early_stopping: {restore_best_weights: true}", "best.keras is always saved: remove the key"),
        ("batch_size: 32", "batch sizes come from `csdctl tune`"),
    ],
)
def test_key_of_fit_has_a_remedy_of_its_own(write: Write, line: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown key") as refused:
        with_recipe(write, line)
    assert refused.value.remedy.startswith(remedy)
    (script := tmp_path / "ts.py").write_text("x = (1,\n")
    with pytest.raises(InputError) as refused:
        load_job(script)
    assert refused.value.remedy == f"`csdctl init {script}` writes a job.yaml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("l2_norm_clip: 1.0", "l2_norm_clip: 0", "l2_norm_clip"),
        ("l2_norm_clip: 1.0", "l2_norm_clip: .inf", "l2_norm_clip"),
        ("noise_multiplier: 8.0", "noise_multiplier: 0", "noise_multiplier"),
        ("noise_multiplier: 8.0", "noise_multiplier: .nan", "noise_multiplier"),
        ("delta: 1.0e-5", "delta: 1", "delta"),
        (", delta: 1.0e-5", "", "delta"),
        ("noise_multiplier", "multiplier", "noise_multiplier"),
    ],
)
def test_impossible_noise_is_refused_with_its_key(write: Write, old: str, new: str, message: str) -> None:
    change = ("~/private}", f"~/private, {NOISE}}}")
    assert load_job(write(change)).noise == Noise(1.0, 8.0, 1e-5)
    with pytest.raises(InputError, match=message):
        load_job(write(change, (old, new)))


WriteJob = Callable[..., Job]


@pytest.fixture
def job(write: Write) -> WriteJob:
    def load(
        more: str = "", *, public: str = "pub", private: str = "/data/private", validation: str = "val"
    ) -> Job:
        paths = ("data/train, on: host", public), ("~/private", private), ("/srv/val", validation)
        return load_job(write(*paths, ("data:\n", f"data:\n  {more}\n" if more else "data:\n")))

    return load


class TestReading:
    def test_images_classes_and_features_are_read(self, job: WriteJob) -> None:
        data = "image: {shape: [64, 48, 3], fit: pad, max_pixels: 1000}\n  classes: [cat, dog]"
        data += "\n  tfrecord: {image: img, label: cls, shape: [4, 4], dtype: float32}"
        read = job(data).data
        assert read.image == ImageRule((64, 48, 3), "pad", 1000)
        assert read.classes == ("cat", "dog")
        assert read.tfrecord == RecordSchema("img", "cls", (4, 4), "float32")

    def test_columns_of_tables_are_read(self, job: WriteJob) -> None:
        assert job("csv: {label: price}").data.csv == TableSchema(("price",))
        table = job("csv: {label: [a, b], weight: w, drop: [id]}").data.csv
        assert table == TableSchema(("a", "b"), "w", ("id",))
        with pytest.raises(InputError, match="job.yaml:4: .*`data.csv.weigth`, did you mean `weight"):
            job("csv: {label: a, weigth: b}")

    def test_function_is_made_absolute_and_its_content_counts(self, job: WriteJob, tmp_path: Path) -> None:
        file = tmp_path / "my_data.py"
        file.write_text("def load(path): ...")
        loaded = job(private="/data, function: my_data.py:load")
        assert loaded.data.functions == (f"{file}:load",)
        assert loaded.function_files == (file,)
        before = loaded.fingerprint()
        file.write_text("def load(path): return 1")
        assert loaded.fingerprint() != before

    @pytest.mark.parametrize("function", ["my_data.py:load", "my_model.py", "my_model.txt:load", "load"])
    def test_missing_function_is_refused(self, job: WriteJob, tmp_path: Path, function: str) -> None:
        (tmp_path / "my_model.py").write_text("")
        with pytest.raises(InputError, match="was not found|is not a valid reference"):
            job(public=f"pub, function: '{function}'")


class TestPrivatePath:
    @pytest.mark.parametrize(
        ("private", "other"),
        [
            ("/srv/data", "/srv/data"),
            ("/srv/data", "/srv/./data/train"),
            ("/srv/data/mine", "/srv/data"),
            ("/srv/data", "/srv/other/../data"),
            ("~/data", "~/data"),
            ("data/mine", "./data"),
        ],
    )
    def test_private_data_among_other_data_is_refused(self, job: WriteJob, private: str, other: str) -> None:
        with pytest.raises(InputError, match=r"data\.public\.path .* overlap") as raised:
            job(private=private, public=other)
        assert raised.value.exit_code == 2
        with pytest.raises(InputError, match=r"data\.validation\.path .* overlap"):
            job(private=private, validation=other)

    def test_public_link_to_the_private_path_is_refused(self, job: WriteJob, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "pub").symlink_to(tmp_path / "mine")
        with pytest.raises(InputError, match="overlap"):
            job(private=str(tmp_path / "mine"))

    @pytest.mark.parametrize("private", ["/data/../etc", "..", "~/../other", "a/..", "/"])
    def test_parent_reference_and_the_root_directory_are_refused(self, job: WriteJob, private: str) -> None:
        with pytest.raises(InputError, match="overlap" if private == "/" else r"contains `\.\.`"):
            job(private=private)

    @pytest.mark.parametrize("private", ["/data/private2", "~/private", "private", "/data/priv"])
    def test_sibling_paths_are_accepted(self, job: WriteJob, private: str) -> None:
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
