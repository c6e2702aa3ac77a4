"""The user's augmentation: what it gets and may return, how its random numbers repeat, and steps with it."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.shipping.store import pack_code
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.user_code import Augmentation, try_augment
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.model_info import AugmentTrial
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import UserCode
from tests.unit.worker.compute.built_models import Step, keras, make_step
from tests.unit.worker.ingest.prepared_data import slice_of

Make = Callable[[str], Augmentation]
COUNTER = itertools.count()
PICTURES = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3, 1)
LABELS = np.arange(4, dtype=np.int32)
FLIP = """\
turned = rng.random(len(samples)) < 0.5
samples[turned] = samples[turned, :, ::-1]
return samples, labels
"""


def write(directory: Path, body: str) -> Path:
    """Write a module of its own name, because Python imports a name once."""
    path = directory / f"augment{next(COUNTER)}.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"import random\nimport numpy as np\ndef own(samples, labels, rng):\n{lines}")
    return path


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda body: Augmentation(f"{write(tmp_path, body)}:own", seed=3)


def test_random_numbers_are_a_function_of_seed_step_and_rank(make: Make, tmp_path: Path) -> None:
    augmentation = make("return samples.astype(float) + rng.random(samples.shape), labels")
    samples = np.zeros((4, 5), np.float32)
    places = [(step, rank) for step in range(3) for rank in range(3)]
    first = {place: augmentation(samples, LABELS, *place)[0] for place in places}
    assert len({array.tobytes() for array in first.values()}) == len(places)
    for place in reversed(places):
        assert np.array_equal(augmentation(samples, LABELS, *place)[0], first[place])
    other = Augmentation(f"{write(tmp_path, 'return rng.random(samples.shape), labels')}:own", seed=4)
    assert not np.array_equal(other(samples, LABELS, 0, 0)[0], first[0, 0])


def test_global_generators_of_a_library_repeat_too(make: Make) -> None:
    augmentation = make("return samples + [[random.random(), np.random.random()]], labels")
    samples = np.zeros((2, 2), np.float32)
    first, other = (augmentation(samples, LABELS[:2], step, 0)[0] for step in (0, 1))
    random.seed()
    assert np.array_equal(augmentation(samples, LABELS[:2], 0, 0)[0], first)
    assert not np.array_equal(first, other)


def test_function_may_change_what_it_gets_and_is_not_called_without_samples(make: Make) -> None:
    before = PICTURES.copy()
    before.flags.writeable = False
    samples, labels = make(FLIP)(before, LABELS, 1, 0)
    assert np.array_equal(before, PICTURES)
    assert samples.dtype == np.uint8
    assert not np.array_equal(samples, before)
    assert np.array_equal(labels, LABELS)
    assert len(make("raise ValueError")(PICTURES[:0], LABELS[:0], 0, 0)[0]) == 0


@pytest.mark.parametrize(
    ("body", "samples"),
    [
        ("return samples.astype(np.float64) + 0.5, labels.astype(np.int64)", np.zeros((4, 2), np.float32)),
        ("return [samples.tolist(), labels.tolist()]", PICTURES),
        ("import tensorflow as tf\nreturn tf.identity(samples), tf.identity(labels)", PICTURES),
    ],
)
def test_types_are_converted_where_no_value_changes(body: str, samples: np.ndarray, make: Make) -> None:
    load_backend()  # before a function imports TensorFlow
    changed, labels = make(body)(samples, LABELS, 0, 0)
    assert (changed.dtype, labels.dtype) == (samples.dtype, np.int32)
    assert np.array_equal(labels, LABELS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "returned a NoneType, expected (samples, labels)"),
        ("return samples[:3], labels", "returned samples as 3×3×3×1 uint8, expected 4×3×3×1 uint8"),
        ("return samples, labels[:, None]", "returned labels as 4×1 int32, expected 4 int32"),
        ("return samples / 255, labels", "returned samples as 4×3×3×1 float64, expected 4×3×3×1 uint8"),
        ("return samples, {'y': labels}", "returned labels as a dict, expected 4 int32"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_other_results_are_refused_with_a_remedy(body: str, message: str, make: Make) -> None:
    with pytest.raises(WorkerError) as caught:
        make(body)(PICTURES, LABELS, 0, 0)
    assert caught.value.message.endswith(f".py:own {message}")
    assert caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite_are_refused_unless_the_data_has_them(make: Make) -> None:
    augmentation = make("samples[0] = np.nan\nreturn samples, labels")
    with pytest.raises(WorkerError, match="that are not finite"):
        augmentation(np.zeros((4, 2), np.float32), LABELS, 0, 0)
    augmentation(np.full((4, 2), np.nan, np.float32), LABELS, 0, 0)


def test_named_inputs_and_outputs_are_dicts(make: Make) -> None:
    samples = np.zeros(4, [("picture", np.uint8, (2, 2)), ("weather", np.float32, (3,))])
    labels = np.zeros(4, [("label", np.int32), ("sample_weight", np.float32)])
    changed, weighted = make(
        "return {**samples, 'weather': samples['weather'] + 1}, {**labels, 'sample_weight': [2, 2, 2, 2]}"
    )(samples, labels, 0, 0)
    assert changed.dtype == samples.dtype
    assert changed["weather"].min() == 1
    assert weighted["sample_weight"].tolist() == [2, 2, 2, 2]
    with pytest.raises(WorkerError, match="returned samples picture, expected a dict of picture, weather"):
        make("return {'picture': samples['picture']}, labels")(samples, labels, 0, 0)


def test_first_samples_are_passed_one_by_one(make: Make) -> None:
    augmentation = make("return samples[::-1] + len(samples), labels + len(samples)")
    samples, labels = augmentation(PICTURES, LABELS, 0, 0, 2)
    assert np.array_equal(samples, np.concatenate([PICTURES[:2] + 1, PICTURES[:1:-1] + 2]))
    assert labels.tolist() == [1, 2, 4, 5]
    # Of a sample that is passed alone, nothing depends on the samples around it.
    random_numbers = make("return samples + rng.random(samples.shape), labels")
    floats = np.zeros((4, 3), np.float32)
    all_of_4, of_3 = (random_numbers(floats[:n], LABELS[:n], 0, 0, n)[0] for n in (4, 3))
    assert np.array_equal(all_of_4[:3], of_3)
    assert len(np.unique(all_of_4)) == 12


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_error_names_the_function_and_no_value_of_a_sample(error: str, make: Make) -> None:
    with pytest.raises(WorkerError, match=rf"\.py:own fails: {error}") as caught:
        make(f"raise {error}(samples)")(np.full((2, 1), 987_654.0, np.float32), LABELS[:2], 0, 0)
    assert "987" not in caught.value.message + caught.value.remedy


def trial_of(tmp_path: Path, body: str, samples: np.ndarray = PICTURES) -> AugmentTrial:
    path = write(tmp_path, body)
    np.save(tmp_path / "images.npy", samples)
    np.save(tmp_path / "labels.npy", np.zeros(len(samples), np.int64))
    archive = tmp_path / f"{path.stem}.zip"
    archive.write_bytes(pack_code([path]))
    return AugmentTrial(f"{path}:own", UserCode(str(archive), (path.stem,)), slice_of(tmp_path), 0)


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a trial adds to the path of imports."""
    monkeypatch.syspath_prepend("")


TRIALS: list[tuple[str, str]] = [
    ("raise ValueError('no such thing')", "fails with 4 samples: ValueError: no such thing"),
    ("if len(samples) < 2: raise IndexError\nreturn samples, labels", "fails with 1 samples: IndexError"),
    (
        "import tensorflow as tf\nturned = tf.random.uniform([len(samples)]) < 0.5\n"
        "return np.where(turned[:, None, None, None], samples[:, :, ::-1], samples), labels",
        "returns different results for the same rng",
    ),
    ("from os import urandom\nreturn samples ^ urandom(1)[0], labels", "different results for the same rng"),
]


@pytest.mark.parametrize(("body", "message"), TRIALS)
def test_trial_refuses_what_ranks_could_not_use(body: str, message: str, tmp_path: Path) -> None:
    """It uses several samples, and one."""
    try_augment(trial_of(tmp_path, FLIP))
    with pytest.raises(WorkerError, match=message) as caught:
        try_augment(trial_of(tmp_path, body))
    assert (caught.value.exit_code, bool(caught.value.remedy)) == (2, True)


def test_trial_names_a_module_that_the_job_does_not_name(tmp_path: Path) -> None:
    (tmp_path / "no_helper_in_code.py").write_text("")
    trial: Any = trial_of(tmp_path, "return samples, labels")
    path = Path(trial.reference.rpartition(":")[0])
    path.write_text("import no_helper_in_code\n" + path.read_text())
    Path(trial.code.archive).write_bytes(pack_code([path]))
    with pytest.raises(WorkerError, match=rf"importing {path.stem} .*No module named 'no_helper_in_code'"):
        try_augment(trial)


SHIFT = """\
with open(__file__ + ".sizes", "a") as sizes:
    sizes.write(f"{len(samples)} ")
return samples + rng.normal(size=samples.shape), labels
"""
GENERATOR = np.random.default_rng(5)
SAMPLES = GENERATOR.random((7, 4), np.float32)
CLASSES = (np.arange(7) % 3).astype(np.int32)


def own_step(augment: str, **options: Any) -> Step:
    keras().utils.set_random_seed(2)
    model = keras().Sequential([keras().Input((4,)), keras().layers.Dense(3, activation="softmax")])
    recipe = Recipe(learning_rate=0.5, augment=augment, seed=9)
    return make_step(model, recipe, SAMPLES, CLASSES, rank=2, **options)


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return f"{write(tmp_path, SHIFT)}:own"


def augmented(reference: str, step: int, num_single: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return Augmentation(reference, 9)(SAMPLES, CLASSES, step, 2, num_single)


@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_gradient_is_that_of_the_augmented_batch_of_this_step(
    micro_batch_size: int | None, reference: str
) -> None:
    plain, own = own_step(""), own_step(reference, micro_batch_size=micro_batch_size)
    vectors = []
    for number in (4, 5):
        own.set_step(number, 0.5)
        vectors.append(own.local(SAMPLES, CLASSES))
        expected = plain.local(*augmented(reference, number))
        assert np.allclose(vectors[-1], expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(*vectors)
    assert not np.allclose(vectors[0], plain.local(SAMPLES, CLASSES))


def test_evaluation_is_not_augmented_and_rank_0_can_take_the_random_states_of_others(reference: str) -> None:
    plain, own = own_step(""), own_step(reference)
    assert own.evaluate(SAMPLES, CLASSES) == plain.evaluate(SAMPLES, CLASSES)
    own.position = 6, 0
    expected = plain.local(*Augmentation(reference, 9)(SAMPLES, CLASSES, 6, 0))
    assert np.allclose(own.local(SAMPLES, CLASSES), expected, rtol=1e-5, atol=1e-6)


def test_private_samples_with_noise_are_augmented_one_by_one(reference: str) -> None:
    noise = Noise(1e6, 1e-12, 1e-5)  # no clipping, and no visible noise
    own, plain = own_step(reference, noise=noise), own_step("", noise=noise)
    own.set_step(1, 0.5)
    found = own.local(SAMPLES, CLASSES, private_copies=np.ones(4, np.int64))
    sizes = Path(reference.rpartition(":")[0] + ".sizes")
    assert sizes.read_text().split() == ["1", "1", "1", "1", "3"]
    expected = plain.local(*augmented(reference, 1, 4), private_copies=np.ones(4, np.int64))
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
