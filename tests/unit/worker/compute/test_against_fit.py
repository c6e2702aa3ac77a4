"""Unequal batches, summed, take the steps of Keras' own train_on_batch; data by name; learning rates."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.recipe import LossTerm, Recipe, learning_rate
from csdctl.worker.protocol.run_spec import RankSpec, Runtime
from csdctl.worker.tasks.progress import Reporter
from csdctl.worker.tasks.train import EVALUATION_BATCH, evaluate
from tests.unit.worker.compute.built_models import Step, as_records, keras, make_step
from tests.unit.worker.ingest.prepared_data import slice_of

pytestmark = pytest.mark.first(6)

PARTS = (20, 0, 9, 3)
"""Batches of four ranks; one has no samples."""
NUM_SAMPLES = sum(PARTS)
NUM_STEPS = 5
TOLERANCE = 1e-6
"""Of the loss, relative, and of the weights."""
Array = np.ndarray[Any, Any]

generator = np.random.default_rng(0)
COUNT = NUM_SAMPLES * NUM_STEPS
IMAGES = generator.random((COUNT, 9, 9, 3), np.float32)
CLASSES = generator.integers(0, 5, COUNT).astype(np.int32)
WEIGHTS = generator.random(COUNT).astype(np.float32)
TOKENS = generator.integers(0, 50, (COUNT, 12)).astype(np.int32)
TOKENS[:, 7:] *= generator.random((COUNT, 5)) < 0.5
"""0 is masked."""
TAGS = generator.integers(0, 4, (COUNT, 12)).astype(np.int32)
TWO = {"kind": CLASSES, "size": generator.random((COUNT, 1)).astype(np.float32)}


def pictures() -> Any:
    layers = keras().layers
    head = [layers.GlobalAveragePooling2D(), layers.Dense(5, activation="softmax", dtype="float32")]
    return sequential(layers.Conv2D(8, 3, kernel_regularizer="l2"), layers.ReLU(), *head)


def tagger() -> Any:
    layers = keras().layers
    inputs = keras().Input((12,), dtype="int32")
    middle = layers.LSTM(8, return_sequences=True)(layers.Embedding(50, 8, mask_zero=True)(inputs))
    return keras().Model(inputs, layers.Dense(4)(middle))


def sequential(*layers: Any) -> Any:
    return keras().Sequential([keras().Input((9, 9, 3)), *layers])


def pixels() -> Any:
    return sequential(keras().layers.Conv2D(4, 3, padding="same", activation="softmax"))


def two_outputs() -> Any:
    layers, optimizers = keras().layers, keras().optimizers
    inputs = keras().Input((9, 9, 3))
    middle = layers.Flatten()(inputs)
    kind = layers.Dense(5, activation="softmax", name="kind")(middle)
    model = keras().Model(inputs, {"kind": kind, "size": layers.Dense(1, name="size")(middle)})
    model.compile(
        optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 100, 0.9)),
        loss={"kind": CROSSENTROPY, "size": keras().losses.Huber()},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def with_an_output_without_a_loss() -> Any:
    """Return a model with an output that fit leaves as it is, whatever its decay and its constraint."""
    model = two_outputs()
    model.get_layer("size").kernel.constraint = keras().constraints.UnitNorm()
    model.compile(keras().optimizers.AdamW(0.01, weight_decay=0.5), {"kind": CROSSENTROPY, "size": None})
    return model


def with_a_metric_of_a_layer() -> Any:
    """Return a model whose layer has counted the batch that it was called with before training."""
    layers, metrics = keras().layers, keras().metrics

    class Measured(layers.Flatten):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.size = metrics.Mean(name="size")

        def call(self, inputs: Any) -> Any:
            self.size.update_state(keras().ops.mean(inputs))
            return super().call(inputs)

    model = sequential(Measured(), layers.Dense(5, activation="softmax"))
    model(9 * IMAGES[:2])
    return model


def two_losses(*losses: Any) -> Callable[[], Any]:
    """Return what builds a model with a class and a masked tag for each step, each with a loss."""

    def build() -> Any:
        layers = keras().layers
        inputs = keras().Input((12,), dtype="int32")
        embedded = layers.Embedding(50, 8, mask_zero=True)(inputs)
        kind = layers.Dense(5, activation="softmax", name="kind")(layers.GlobalAveragePooling1D()(embedded))
        tags = layers.Dense(4, name="tags")(layers.LSTM(8, return_sequences=True)(embedded))
        model = keras().Model(inputs, {"kind": kind, "tags": tags})
        kinds = keras().losses.SparseCategoricalCrossentropy
        model.compile(loss={name: kinds(**one) for name, one in zip(("kind", "tags"), losses, strict=True)})
        return model

    return build


def spectral() -> Any:
    layers = keras().layers
    return sequential(layers.SpectralNormalization(layers.Conv2D(8, 3)), layers.Flatten(), layers.Dense(5))


def with_summed() -> Any:
    """Return a model that adds a loss for each sample, which fit sums over the batch."""
    layers = keras().layers

    class Adding(layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * keras().ops.mean(inputs**2, axis=-1))
            return inputs

    inputs = keras().Input((9, 9, 3))
    x = layers.Dense(5, kernel_regularizer="l2")(layers.Flatten()(inputs))
    model = keras().Model(inputs, layers.Softmax()(Adding()(x)))
    model.compile("sgd")
    return model


def share_of_second_class(y_true: Any, y_pred: Any) -> Any:
    """One number for the batch, as many metrics of users return it."""
    return keras().ops.mean(y_pred[:, 1])


def with_all_of_these() -> Any:
    model, optimizers = with_summed(), keras().optimizers
    model.compile(
        optimizers.SGD(0.01, gradient_accumulation_steps=2),
        "sparse_categorical_crossentropy",
        metrics=[share_of_second_class, "accuracy"],
    )
    return model


def distiller() -> Any:
    """Return a model with a compile() and a compute_loss() of its own, as in keras.io's distillation.

    One of its layers is used by compute_loss alone, and has no weights before.
    """
    losses = keras().losses

    class Distiller(keras().Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = pictures(), pictures()
            self.teacher.trainable = False
            self.judge = keras().layers.Dense(3, kernel_initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.student(x, training=training)

        def compile(self, optimizer: Any, student_loss: Any) -> None:
            super().compile(optimizer=optimizer, metrics=["accuracy"])
            self.student_loss, self.distillation_loss = student_loss, losses.KLDivergence()

        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            taught = self.distillation_loss(self.teacher(x, training=False), y_pred)
            judged = keras().ops.mean(keras().ops.square(self.judge(y_pred) - 1))
            return 0.3 * self.student_loss(y, y_pred) + 0.7 * taught + judged

    model = Distiller()
    model.compile(keras().optimizers.SGD(0.05), losses.SparseCategoricalCrossentropy())
    return model


def records_of(labels: Any, weights: Array | None) -> Array:
    if isinstance(labels, dict):
        return as_records(labels, weights)
    return labels if weights is None else as_records({"label": labels}, weights)


def rows(labels: Any, part: slice) -> Any:
    is_dict = isinstance(labels, dict)
    return {name: column[part] for name, column in labels.items()} if is_dict else labels[part]


SGD = {"learning_rate": 0.05}
IGNORING = {"ignore_class": 0, "from_logits": True}
MASKS = generator.integers(0, 4, (COUNT, 9, 9))
PIXEL_WEIGHTS = generator.random((COUNT, 9, 9)).astype(np.float32)
WORD_WEIGHTS = generator.random((COUNT, 12)).astype(np.float32)
CROSSENTROPY = "sparse_categorical_crossentropy"


@dataclass(frozen=True)
class Case:
    """A model, and what it is trained on."""

    build: Callable[[], Any]
    recipe: Recipe
    samples: Array = field(default_factory=lambda: IMAGES)
    labels: Any = field(default_factory=lambda: CLASSES)
    weights: Array | None = None
    micro_batch_size: int | None = None


CLIPPED = {"global_clipnorm": 0.1, "weight_decay": 0.01, "use_ema": True}
OVER_WEIGHTS = {"reduction": "mean_with_sample_weight", "from_logits": True}
OVER_SUM = {"reduction": "mean_with_sample_weight"}
IGNORING_0 = {"": LossTerm(CROSSENTROPY, {"ignore_class": 0})}
IGNORING_OVER_WEIGHTS = {"": LossTerm(CROSSENTROPY, {"ignore_class": 0, **OVER_SUM})}
SMOOTHED = {"": LossTerm("binary_crossentropy", {"label_smoothing": 0.1})}
CASES = {
    "a mask and an ignored class": Case(
        tagger, Recipe(losses={"": LossTerm(CROSSENTROPY, IGNORING)}, **SGD), TOKENS, TAGS
    ),
    "accumulation, a summed loss and a mean, a metric of the batch": Case(
        with_all_of_these, Recipe(), micro_batch_size=12
    ),
    "two outputs, weighted": Case(two_outputs, Recipe(), labels=TWO, weights=WEIGHTS),
    "an output without a loss": Case(with_an_output_without_a_loss, Recipe(), labels=TWO),
    "a metric of a layer": Case(with_a_metric_of_a_layer, Recipe(**SGD)),
    "distillation": Case(distiller, Recipe()),
    "class weights of one-hot labels": Case(
        pictures,
        Recipe(losses={"": LossTerm("categorical_crossentropy")}, **SGD, class_weight={"0": 3.0, "2": 0.5}),
        labels=np.eye(5, dtype=np.float32)[CLASSES],
    ),
    "clipping, decay and average": Case(pictures, Recipe(optimizer="adamw", optimizer_args=CLIPPED, **SGD)),
    "an ignored class": Case(pixels, Recipe(losses=IGNORING_0, **SGD), labels=MASKS),
    "a weight for each pixel": Case(pixels, Recipe(**SGD), labels=MASKS, weights=PIXEL_WEIGHTS),
    "a mask, divided by the sum of the weights": Case(
        tagger, Recipe(losses={"": LossTerm(CROSSENTROPY, OVER_WEIGHTS)}, **SGD), TOKENS, TAGS, WORD_WEIGHTS
    ),
    "an ignored class, divided by the sum of the weights": Case(
        pixels, Recipe(losses=IGNORING_OVER_WEIGHTS, **SGD), labels=MASKS, weights=PIXEL_WEIGHTS
    ),
    "weights that are negative, divided by their sum": Case(
        pictures, Recipe(losses={"": LossTerm(CROSSENTROPY, OVER_SUM)}, **SGD), weights=WEIGHTS - 0.8
    ),
    "class weights, divided by their sum": Case(
        pictures,
        Recipe(losses={"": LossTerm(CROSSENTROPY, OVER_SUM)}, **SGD, class_weight={"0": 3.0, "2": 0.0}),
    ),
    "spectral normalization": Case(
        spectral,
        Recipe(from_logits=True, optimizer="adamw", optimizer_args={"weight_decay": 0.1}, learning_rate=0.01),
        micro_batch_size=12,
    ),
    "metrics with state": Case(
        lambda: sequential(keras().layers.Flatten(), keras().layers.Dense(1, activation="sigmoid")),
        Recipe(losses=SMOOTHED, metrics=("AUC", "Precision", "Recall", "accuracy"), **SGD),
        labels=(CLASSES > 2).astype(np.float32)[:, None],
    ),
}


def local_sum(step: Step, samples: Array, labels: Array) -> Array:
    """Return the sum of the vectors of ranks with the parts of a batch."""
    parts = np.split(np.arange(NUM_SAMPLES), np.cumsum(PARTS)[:-1])
    return np.sum([np.array(step.local(samples[part], labels[part])) for part in parts], axis=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unequal_batches_take_the_steps_of_fit(case: Case) -> None:
    recipe, samples, labels, weights = case.recipe, case.samples, case.labels, case.weights
    keras().utils.set_random_seed(1)
    theirs, ours = case.build(), case.build()
    ours.set_weights(theirs.get_weights())
    rate = compile_model(theirs, recipe).learning_rate
    assert rate is not None
    records = records_of(labels, weights)
    step = make_step(ours, recipe, samples, records, micro_batch_size=case.micro_batch_size)
    class_weight = {int(number): weight for number, weight in recipe.class_weight.items()} or None
    for number in range(NUM_STEPS):
        whole = slice(number * NUM_SAMPLES, (number + 1) * NUM_SAMPLES)
        theirs.reset_metrics()
        weighted = {
            "sample_weight": None if weights is None else weights[whole],
            "class_weight": class_weight,
        }
        expected = theirs.train_on_batch(samples[whole], rows(labels, whole), return_dict=True, **weighted)
        step.set_step(number, rate)
        sums = step.apply(local_sum(step, samples[whole], records[whole]))
        metrics = {"loss": sums.mean_loss, **step.metrics(sums)}
        by_name = {name.rstrip("_0123456789"): value for name, value in metrics.items()}
        assert len(by_name) == len(metrics)
        for name, value in expected.items():
            ours_value = by_name[name.rstrip("_0123456789")]
            assert ours_value == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE), name
    check_weights(step, theirs)


def check_weights(step: Step, model: Any) -> None:
    for expected, weights in zip(model.get_weights(), step.weights, strict=True):
        np.testing.assert_allclose(expected, weights, atol=2 * TOLERANCE)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_weight_of_a_sample_counts_for_each_of_its_steps(reduction: str) -> None:
    """As weights (n, 1) do in fit, which takes no weights (n,) where each step has a label."""
    terms = {"": LossTerm(CROSSENTROPY, {"reduction": reduction, "from_logits": True})}
    keras().utils.set_random_seed(1)
    model, recipe, some = tagger(), Recipe(losses=terms, **SGD), slice(NUM_SAMPLES)
    compile_model(model, recipe)
    expected = model.test_on_batch(TOKENS[some], TAGS[some], WEIGHTS[some, None], return_dict=True)["loss"]
    records = as_records({"label": TAGS[some]}, WEIGHTS[some])
    step = make_step(model, recipe, TOKENS, records)
    sums = step.read_sums(local_sum(step, TOKENS[some], records)[step.layout.sums])
    assert sums.mean_loss == pytest.approx(float(expected), rel=TOLERANCE)


def test_step_in_which_nothing_has_a_weight_is_that_of_fit() -> None:
    """The optimizer steps with a gradient of 0: its momentum moves the weights."""
    options = {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}, "learning_rate": 0.05}
    recipe = Recipe(losses={"": LossTerm(CROSSENTROPY, OVER_SUM)}, **options)
    keras().utils.set_random_seed(1)
    theirs, ours = pixels(), pixels()
    ours.set_weights(theirs.get_weights())
    compile_model(theirs, recipe)
    samples, classes = IMAGES[:NUM_SAMPLES], MASKS[:NUM_SAMPLES]
    step = make_step(ours, recipe, samples, as_records({"label": classes}, PIXEL_WEIGHTS[:NUM_SAMPLES]))
    for number, scale in enumerate((1, 0, 1)):
        weights = PIXEL_WEIGHTS[:NUM_SAMPLES] * np.float32(scale)
        theirs.train_on_batch(samples, classes, weights)
        step.set_step(number, 0.05)
        sums = step.apply(local_sum(step, samples, as_records({"label": classes}, weights)))
        assert np.isnan(sums.mean_loss) == (scale == 0)
    check_weights(step, theirs)


@pytest.mark.parametrize(
    "losses",
    [({}, {"from_logits": True}), ({"ignore_class": 0}, {}), (OVER_SUM, {})],
    ids=["a mask of one output", "an ignored class of one", "weights of one"],
)
def test_losses_with_different_divisors_are_refused(losses: Any) -> None:
    """Their sum over ranks would be divided by one of them."""
    labels = as_records({"kind": CLASSES, "tags": TAGS}, WEIGHTS)
    with pytest.raises(WorkerError, match="divided by different numbers, such as samples") as caught:
        make_step(two_losses(*losses)(), Recipe(**SGD), TOKENS, labels)
    assert caught.value.exit_code == 2


def test_state_of_layers_is_a_mean_over_samples_where_the_loss_is_one_over_elements() -> None:
    """Moving statistics of unequal batches are those of fit, and a counter counts the steps."""
    layers, many = keras().layers, (1 << 25) + 1  # float32 has no such number

    class Counting(layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
            self.count.assign(many)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.count.assign_add(1)
            return inputs

    def build() -> Any:
        last = layers.Conv2D(4, 3, padding="same", activation="softmax")
        return sequential(layers.BatchNormalization(momentum=0.7, dtype="float64"), Counting(), last)

    recipe, samples = Recipe(losses=IGNORING_0, **SGD), IMAGES[:NUM_SAMPLES]
    labels = np.random.default_rng(2).integers(0, 4, (NUM_SAMPLES, 9, 9))
    theirs, ours = build(), build()
    compile_model(theirs, recipe)
    step = make_step(ours, recipe, samples, labels)
    theirs.train_on_batch(samples, labels)
    step.apply(local_sum(step, samples, labels))
    for name in ("moving_mean", "moving_variance"):
        found, expected = (np.asarray(getattr(model.layers[0], name)) for model in (step.model, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert int(np.asarray(ours.layers[1].count)) == int(np.asarray(theirs.layers[1].count)) == many + 1


def test_validation_is_that_of_keras_evaluate(tmp_path: Path) -> None:
    """The last batch is a partial one, whose samples count as all others do."""
    keras().utils.set_random_seed(1)
    model, recipe = pictures(), Recipe(metrics=("accuracy",), **SGD)
    compile_model(model, recipe)
    count = EVALUATION_BATCH + 40
    samples = np.random.default_rng(3).random((count, 9, 9, 3), np.float32)
    samples[EVALUATION_BATCH:] *= 4.0
    labels, weights = np.resize(CLASSES, count), np.resize(WEIGHTS, count)
    expected = model.evaluate(
        samples, labels, sample_weight=weights, batch_size=count, return_dict=True, verbose=0
    )
    records = records_of(labels, weights)
    np.save(tmp_path / "images.npy", samples)
    np.save(tmp_path / "labels.npy", records)
    part, step = slice_of(tmp_path), make_step(model, recipe, samples, records)
    reporter = Reporter(RankSpec(0, "host", 8, Runtime(), None, None, 0, 0))
    found = evaluate(step, PreparedSamples(part), reporter, progress_interval_s=3600.0)
    assert found["validation_loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert found["validation_accuracy"] == pytest.approx(expected["accuracy"], rel=TOLERANCE)


def test_validation_without_any_weight_ends_the_run(tmp_path: Path) -> None:
    recipe = Recipe(losses={"": LossTerm(CROSSENTROPY, OVER_SUM)}, **SGD)
    samples, records = IMAGES[:4], records_of(CLASSES[:4], np.zeros(4, np.float32))
    np.save(tmp_path / "images.npy", samples)
    np.save(tmp_path / "labels.npy", records)
    step = make_step(pictures(), recipe, samples, records)
    reporter = Reporter(RankSpec(0, "host", 8, Runtime(), None, None, 0, 0))
    with pytest.raises(
        WorkerError, match="the validation data has no loss: the weights of all samples are 0"
    ):
        evaluate(step, PreparedSamples(slice_of(tmp_path)), reporter, progress_interval_s=3600.0)


def test_class_weights_multiply_those_of_samples_and_count_in_training_alone() -> None:
    recipe = Recipe(class_weight={"0": 3.0, "2": 0.5}, **SGD)
    samples, weights, classes = IMAGES[:NUM_SAMPLES], WEIGHTS[:NUM_SAMPLES], CLASSES[:NUM_SAMPLES]
    keras().utils.set_random_seed(1)
    model = pictures()
    compile_model(model, recipe)
    of_class = np.array([3.0, 1.0, 0.5, 1.0, 1.0], np.float32)[classes]
    in_training, in_validation = (
        model.test_on_batch(samples, classes, sample_weight=one, return_dict=True)["loss"]
        for one in (weights * of_class, weights)
    )
    records = records_of(classes, weights)
    step = make_step(model, recipe, samples, records)
    assert step.evaluate(samples, records).mean_loss == pytest.approx(float(in_validation), rel=TOLERANCE)
    trained = step.read_sums(np.array(step.local(samples, records))[step.layout.sums])
    assert trained.mean_loss == pytest.approx(float(in_training), rel=TOLERANCE)


def test_average_of_the_weights_is_held_where_the_model_is_saved() -> None:
    keras().utils.set_random_seed(1)
    model, arguments = pictures(), {"use_ema": True, "ema_momentum": 0.5}
    recipe = Recipe(optimizer="sgd", optimizer_args=arguments, learning_rate=0.5)
    step = make_step(model, recipe, IMAGES, CLASSES)
    for number in range(3):
        step.set_step(number, 0.5)
        step.apply(np.array(step.local(IMAGES[:8], CLASSES[:8])))
    trained, averaged = step.weights, step.averaged_values()[: len(step.weights)]
    assert any(not np.array_equal(one, its) for one, its in zip(trained, averaged, strict=True))
    model.optimizer.finalize_variable_values(step.model.trainable_variables)
    assert all(np.array_equal(one, its) for one, its in zip(averaged, model.get_weights(), strict=True))


def test_layer_that_writes_its_trainable_weight_is_refused() -> None:
    """Each rank would write another one."""
    layers = keras().layers

    class Centered(layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.kernel.assign(self.kernel - keras().ops.mean(self.kernel))
            return super().call(inputs)

    model = keras().Sequential([keras().Input((9,)), Centered(5, name="centered")])
    with pytest.raises(WorkerError, match="forward pass writes .*centered/kernel") as caught:
        make_step(model, Recipe(from_logits=True, **SGD), np.zeros((0, 9), np.float32), CLASSES)
    assert (caught.value.exit_code, "trainable=False" in caught.value.remedy) == (2, True)


FEW = 12
INPUTS = {"b": generator.random((FEW, 1)), "a": generator.random((FEW, 3))}
LABELS = {"kind": np.arange(FEW) % 2, "age": generator.random(FEW)}
FACTORS = np.linspace(0, 2, FEW)
LOSSES = {"kind": "sparse_categorical_crossentropy", "age": "mse"}


def named_or_in_order(*, named: bool, normalized: bool = False, features: bool = False) -> Any:
    """Return a model of two inputs and two outputs, as dicts or as lists; `features`: with a third one."""
    first, second = keras().Input((3,), name="a"), keras().Input((1,), name="b")
    scaled = keras().layers.Rescaling(0.5)(first)
    joined = keras().layers.Concatenate()([scaled, second])
    outputs = {
        "kind": keras().layers.Dense(2, activation="softmax", name="kind")(joined),
        "age": keras().layers.Dense(1, name="age")(joined),
    }
    if features:
        outputs = {"features": keras().layers.Dense(4, name="features")(joined), **outputs}
    # A dict of tensors that are no inputs: Keras clones them under other names.
    inputs = {"a": scaled if normalized else first, "b": second}
    model = keras().Model(
        inputs if named else list(inputs.values()), outputs if named else list(outputs.values())
    )
    losses = LOSSES if named or not features else {**LOSSES, "features": None}
    model.compile("sgd", loss=losses)
    return model


def loss_in_evaluation(model: Any, samples: np.ndarray, labels: np.ndarray) -> float:
    step = Step(model, Recipe(input_range=None), (samples[:0], labels[:0]))
    return step.evaluate(samples, labels).mean_loss


def loss_in_keras(model: Any, inputs: Any, labels: Any) -> float:
    return float(model.evaluate(inputs, labels, sample_weight=FACTORS, verbose=0, return_dict=True)["loss"])


@pytest.mark.parametrize("normalized", [False, True])
def test_dicts_are_taken_by_name_in_any_order(normalized: bool) -> None:
    model = named_or_in_order(named=True, normalized=normalized)
    expected = loss_in_keras(model, INPUTS, LABELS)
    for order in (list, lambda names: list(reversed(list(names)))):
        samples = as_records({name: INPUTS[name] for name in order(INPUTS)})
        labels = as_records({name: LABELS[name] for name in order(LABELS)}, FACTORS)
        assert loss_in_evaluation(model, samples, labels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("features", [False, True])
def test_tuples_are_taken_in_order_and_an_output_without_a_loss_needs_no_labels(
    named: bool, features: bool
) -> None:
    model = named_or_in_order(named=named, features=features)
    inputs, labels = (INPUTS["a"], INPUTS["b"]), tuple(LABELS.values())
    samples = as_records({f"input_{number}": values for number, values in enumerate(inputs)})
    records = as_records({f"output_{number}": values for number, values in enumerate(labels)}, FACTORS)
    if features:
        samples, records = as_records(INPUTS), as_records(LABELS, FACTORS)
    unused = [np.zeros((FEW, 4))] * features
    expected = loss_in_keras(model, *((INPUTS, LABELS) if named else ([*inputs], [*unused, *labels])))
    assert loss_in_evaluation(model, samples, records) == pytest.approx(expected, rel=1e-6)


RECIPE = Recipe(epochs=10, learning_rate=0.1, reference_batch=256, warmup_epochs=2.0)


@pytest.mark.first(10)
@pytest.mark.parametrize(
    ("changes", "global_batch", "expected"),
    [
        pytest.param({}, 1024, {0: 0.1, 0.5: 0.175, 1: 0.25, 1.5: 0.325, 2: 0.4, 3: 0.4}, id="warm-up"),
        pytest.param({}, 512, {1: 0.15, 2: 0.2}, id="a fleet that shrank"),
        pytest.param({}, 64, {0: 0.1, 1: 0.0625, 2: 0.025, 2.6: 0.025}, id="below the reference"),
        pytest.param({"warmup_epochs": 0}, 512, {0.01: 0.2}, id="no warm-up"),
        pytest.param({"epochs": 1, "warmup_epochs": 100}, 1024, {1: 0.103}, id="warm-up beyond the run"),
        pytest.param({"decay": "linear"}, 1024, {1: 0.25, 2: 0.4, 4: 0.3, 6: 0.2, 10: 0}, id="linear"),
        pytest.param({"decay": "cosine"}, 1024, {1: 0.25, 2: 0.4, 4: 0.341421, 6: 0.2, 10: 0}, id="cosine"),
        pytest.param({"decay": "cosine", "warmup_epochs": 10.0}, 1024, {10: 0.4}, id="no time to decay"),
        pytest.param({"max_learning_rate": 0.3}, 100_000, {2: 0.3}, id="capped"),
        pytest.param({"max_learning_rate": 0.3}, 512, {2: 0.2}, id="below the cap"),
    ],
)
def test_rate_by_epoch(changes: dict[str, Any], global_batch: int, expected: dict[float, float]) -> None:
    recipe = replace(RECIPE, **changes)
    found = {epoch: learning_rate(recipe, global_batch, epoch) for epoch in expected}
    assert found == pytest.approx(expected, abs=1e-6)
