"""Models with their own train_step: ranks together against Keras' fit in one process; what a step writes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.compile import make_compiler
from csdctl.worker.compute.keras_internals import find_optimizers
from csdctl.worker.compute.model import build as build_model
from csdctl.worker.compute.model import load, save_model
from csdctl.worker.compute.own_step import repeatable_draws
from csdctl.worker.compute.user_code import import_file
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.model_info import BuildRequest, BuildSpec
from csdctl.worker.protocol.recipe import Recipe
from tests.unit.worker.compute.built_models import Step

tf, keras = load_backend()

N_FEATURES = 6
BATCH = 12
NO_LABELS = np.zeros((4, 0), np.float32)
SPLITS = (7, 0, 5)
"""Unequal batches of three ranks; one has no samples."""


def samples(count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=(count, N_FEATURES)).astype(np.float32)


class Pair(keras.Model):
    """Two networks with an optimizer each, as a GAN; batch norm, a moving average, a counter."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        layers = keras.layers
        inner = [layers.Dense(8), layers.ReLU(), layers.Dense(6)]
        self.first = keras.Sequential([keras.Input((N_FEATURES,)), *inner])
        self.second = keras.Sequential([keras.Input((N_FEATURES,)), layers.Dense(4, "tanh"), layers.Dense(1)])
        # Without effect on gradients, which are then those of one batch.
        self.norm = layers.BatchNormalization(dtype="float64")
        self.norm.build((None, N_FEATURES))
        self.average = keras.models.clone_model(self.first)
        self.average.trainable = False
        options = {"initializer": "zeros", "trainable": False}
        self.count = self.add_weight(name="count", shape=(), dtype="int32", **options)
        self.center = self.add_weight(name="center", shape=(N_FEATURES,), **options)
        self.tracker = keras.metrics.Mean(name="first_loss")
        self.noise = noise

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first_optimizer, self.second_optimizer = first, second

    def train_step(self, data: Any) -> dict[str, Any]:
        self.norm(data, training=True)
        self.norm(3 * data + 1, training=True)
        with tf.GradientTape() as tape:
            made = self.first(data, training=True)
            if self.noise:
                made += tf.random.normal(tf.shape(made)) + keras.random.normal(tf.shape(made))
            loss = tf.reduce_mean(tf.square(self.second(made) - self.second(data)))
        variables = self.second.trainable_variables
        self.second_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            made = self.first(data, training=True)
            first_loss = tf.reduce_mean(tf.square(made - data)) + tf.reduce_mean(tf.abs(self.second(made)))
        variables = self.first.trainable_variables
        gradients = tape.gradient(first_loss, variables)
        self.first_optimizer.apply(grads=gradients, trainable_variables=variables)
        for weight, average in zip(self.first.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.norm(2 * data, training=True)
        self.count.assign_add(1)
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(data, axis=0))
        self.tracker.update_state(first_loss)
        return {"first_loss": self.tracker.result(), "second_loss": loss}


def build(noise: bool = False, optimizer: Callable[[], Any] | None = None) -> Any:
    keras.utils.set_random_seed(3)
    model = Pair(noise)
    # Adam would make large steps of the rounding of a gradient that is 0, as of a bias before batch norm.
    optimizer = optimizer or (lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer(), optimizer())
    return model


def make_step(model: Any, rank: int = 0) -> Step:
    recipe = Recipe(learning_rate=None, reference_batch=BATCH, input_range=None, seed=5)
    step = Step(model, recipe, (samples(0), np.zeros((0, 0), np.float32)), rank=rank)
    step.set_step(0, step.compiler.first_rate)
    return step


Engine = Callable[[int, list[Any]], Any]
"""Given the number of a sum and the parts of the ranks, returns what takes the place of their sum."""


class Ranks:
    """Ranks whose steps are computed one after the other, up to each of their sums."""

    def __init__(self, steps: Sequence[Step], engine: Engine = lambda at, parts: sum(parts)) -> None:
        self.steps, self._engine = steps, engine
        self.parts: list[list[Any]] = []
        """What each rank gave to each sum of the latest step."""
        self.totals: list[Any] = []

    def take(self, number: int, batches: Sequence[Any]) -> list[Any]:
        """Take step `number` on all ranks; return what each of them has summed."""
        self.parts, self.totals = [], []

        def each_rank(method: str, exchange: Callable[[int, Any], Any]) -> list[Any]:
            results = []
            for rank, (step, batch) in enumerate(zip(self.steps, batches, strict=True)):
                step.set_step(number, step.compiler.first_rate)
                step.position = number, rank
                no_labels = np.zeros((len(batch), 0), np.float32)
                results.append(getattr(step, method)(batch, no_labels, exchange))
            return results

        def give(at: int, part: Any) -> Any:
            if at == len(self.totals):
                self.parts[-1].append(part.copy())
            return self.totals[at] if at < len(self.totals) else part

        for index in range(len(self.steps[0].layouts)):
            self.parts.append([])
            each_rank("_walk", give)
            self.totals.append(np.asarray(self._engine(index, self.parts[-1]), np.float32))
        return each_rank("run", lambda at, _: self.totals[at])


def train(steps: Sequence[Step], data: Any) -> list[Any]:
    """Take a step of all ranks on each BATCH samples; return what they have summed in each."""
    ranks = Ranks(steps)
    batches = [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    return [ranks.take(number, divide(batch)) for number, batch in enumerate(batches)]


def fit(model: Any, data: Any) -> dict[str, list[float]]:
    history: dict[str, list[float]] = model.fit(data, batch_size=BATCH, shuffle=False, verbose=0).history
    return history


def divide(batch: Any) -> list[Any]:
    return np.split(batch, np.cumsum(SPLITS)[:-1])


def weights_of(model: Any) -> list[Any]:
    return [np.asarray(one) for one in model.weights]


def far(first: Any, second: Any) -> float:
    pairs = zip(weights_of(first), weights_of(second), strict=True)
    return max(float(np.max(np.abs(weight - other), initial=0)) for weight, other in pairs)


def test_ranks_train_as_fit_does_and_all_hold_the_same_bits() -> None:
    data, reference = samples(5 * BATCH), build()
    history = fit(reference, data)
    steps = [make_step(build(), rank) for rank in range(len(SPLITS))]
    sums = train(steps, data)
    assert far(steps[0].model, reference) < 2e-6
    states = [step.values for step in steps]
    assert all(all(map(np.array_equal, states[0], state)) for state in states[1:])
    # Logs are the mean over all samples.
    first = [steps[0].metrics(of_ranks[0])["first_loss"] for of_ranks in sums]
    assert np.mean(first) == pytest.approx(history["first_loss"][0], rel=1e-5)
    second = steps[0].metrics(sums[-1][0])["second_loss"]
    assert second == pytest.approx(history["second_loss"][0], rel=1e-4)
    assert len({of_rank.loss for of_rank in sums[2]}) == 1
    assert sums[0][0].count == BATCH


class Autoencoder(keras.Model):
    """Calls fewer layers than its train_step trains, none of which has weights before, as a VAE."""

    def __init__(self) -> None:
        super().__init__()
        start = keras.initializers.GlorotUniform
        self.mean, self.spread = (keras.layers.Dense(2, kernel_initializer=start(seed)) for seed in (1, 2))
        self.decoder = keras.layers.Dense(N_FEATURES, kernel_initializer=start(3))

    def call(self, data: Any) -> Any:
        return self.decoder(self.mean(data))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, spread = self.mean(data), self.spread(data)
            loss = tf.reduce_mean((self.decoder(mean) - data) ** 2 + tf.reduce_mean(tf.exp(spread) - spread))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def test_layer_that_only_train_step_uses_is_trained_as_in_fit() -> None:
    data = samples(3 * BATCH)
    models = [Autoencoder() for _ in range(1 + len(SPLITS))]
    for model in models:
        model(data[:2])  # as csdctl builds it
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    fit(models[0], data)
    steps = [make_step(model, rank) for rank, model in enumerate(models[1:])]
    train(steps, data)
    assert models[0].spread.built
    assert far(steps[0].model, models[0]) < 2e-6


def test_own_step_follows_the_schedule_of_its_recipe() -> None:
    halving = keras.optimizers.schedules.ExponentialDecay(0.08, 2, 0.5, staircase=True)
    recipe = Recipe(schedule=json.dumps(keras.optimizers.schedules.serialize(halving)), learning_rate=0.08)
    step = Step(build(), recipe, (samples(0), NO_LABELS[:0]))
    assert [step.scheduled_rate(number) for number in range(4)] == pytest.approx([0.08, 0.08, 0.04, 0.04])


def test_lost_sum_leaves_the_state_before_the_step() -> None:
    step = make_step(build())
    step.alone(samples(4), NO_LABELS)
    before = step.values
    for lost in range(len(step.layouts)):

        def exchange(number: int, part: Any, lost: int = lost) -> Any:
            if number == lost:
                raise InterruptedError
            return part

        with pytest.raises(InterruptedError):
            step.run(samples(4, 9), NO_LABELS, exchange)
        assert all(map(np.array_equal, before, step.values))


def test_random_numbers_follow_seed_rank_and_step() -> None:
    def parts(step: Step, number: int = 0) -> Any:
        step.set_step(number, 0.01)
        return step.local_sums(samples(4), NO_LABELS)

    step, same, of_rank_1 = (make_step(build(noise=True), rank) for rank in (0, 0, 1))
    first = parts(step)
    assert np.array_equal(first, parts(step))
    assert np.array_equal(first, parts(same))
    assert not np.array_equal(first, parts(step, 1))
    assert not np.array_equal(first, parts(of_rank_1))


@pytest.mark.parametrize(
    "draw",
    [
        lambda *seed: tf.random.normal([9], 0.0, 1.0, tf.float32, *seed),
        lambda *seed: tf.random.uniform([9], 0, 99, tf.int32, *seed),
        lambda *seed: tf.random.categorical([[0.0, 0.0, 0.0]], 9, tf.int32, *seed),
        lambda *seed: tf.random.shuffle(tf.range(9), *seed),
    ],
    ids=["normal", "uniform", "categorical", "shuffle"],
)
def test_seed_of_a_draw_is_ignored_when_given_by_position(draw: Callable[..., Any]) -> None:
    def drawn(*seed: int) -> Any:
        def code() -> Any:
            with repeatable_draws(tf.constant([1, 2])):
                return draw(*seed)

        return np.asarray(tf.function(code)())

    assert np.array_equal(drawn(), drawn(42))


def _with(step: Callable[[Any, Any], Any], seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)

    class Model(Pair):
        def train_step(self, data: Any) -> Any:
            return step(self, data)

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    return model


def _in_condition(model: Any, data: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model.second(data))
    variables = model.second.trainable_variables
    gradients = tape.gradient(loss, variables)

    def apply() -> Any:
        model.second_optimizer.apply(gradients, variables)
        return 1.0

    tf.cond(loss > 0, apply, lambda: 0.0)
    return {"loss": loss}


def update_second(
    model: Any,
    data: Any,
    reduce: Callable[[Any], Any] = tf.reduce_mean,
    change: Callable[[Any], Any] = lambda gradient: gradient,
) -> Any:
    with tf.GradientTape() as tape:
        loss = reduce(tf.square(model.second(data)[:, 0] - 1))
    variables = model.second.trainable_variables
    gradients = [change(gradient) for gradient in tape.gradient(loss, variables)]
    model.second_optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return {"loss": tf.reduce_mean(loss)}


@pytest.mark.parametrize(
    "step",
    [
        lambda model, data: update_second(model, data, tf.identity),
        lambda model, data: tf.function(lambda batch: update_second(model, batch))(data),
    ],
    ids=["gradients of all samples added", "a tf.function"],
)
def test_steps_of_unusual_losses_end_with_the_same_bits(step: Any) -> None:
    data, reference = samples(2 * BATCH), _with(step, seed=4)
    fit(reference, data)
    steps = [make_step(_with(step, seed=4), rank) for rank in range(3)]
    sums = train(steps, data)
    for of_rank in steps[1:]:
        assert all(map(np.array_equal, weights_of(steps[0].model), weights_of(of_rank.model)))
    assert far(steps[0].model, reference) < 2e-6
    assert sums[-1][0].loss > 0


class Compiled(Pair):
    """A model whose compile() is Keras', with its metrics."""

    metrics = keras.Model.metrics  # without call(), they exist after the first train_step

    def compile(self, **options: Any) -> None:
        keras.Model.compile(self, keras.optimizers.SGD(0.1), **options)
        self.second_optimizer = self.optimizer


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_in_condition, "inside of a condition"),
        (
            lambda model, data: update_second(
                model, tf.map_fn(lambda row: row + tf.random.normal([6]), data)
            ),
            "draws from tf.random inside",
        ),
        (
            lambda model, data: update_second(
                model, data, tf.identity, lambda one: tf.clip_by_norm(one, 1.0)
            ),
            "changes the gradient of a loss with a value for each sample",
        ),
        (
            lambda model, data: update_second(
                model, data, lambda one: tf.reduce_mean(tf.nn.dropout(one, 0.5))
            ),
            "which cannot be repeated",
        ),
        (lambda model, data: {"loss": tf.reduce_mean(model.second(data))}, "applies no gradients"),
        (lambda model, data: data.nonsense, "cannot be traced"),
    ],
)
def test_step_that_ranks_cannot_take_is_refused(step: Any, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        make_step(_with(step))


def test_default_optimizer_that_train_step_does_not_use_is_none_of_the_models() -> None:
    model = build()
    assert model.optimizer is not None
    assert find_optimizers(model) == [model.first_optimizer, model.second_optimizer]


def test_batch_has_the_structure_that_fit_passes() -> None:
    seen: list[Any] = []

    def train_step(model: Any, data: Any) -> Any:
        (first, other), (label, second), weight = data
        seen.append(weight.shape.rank)
        return update_second(model, (first + other) * label * second)

    inputs = np.zeros(0, [(f"input_{number}", np.float32, (N_FEATURES,)) for number in range(2)])
    labels = np.zeros(0, [(name, np.float32, (1,)) for name in ("output_0", "output_1", "sample_weight")])
    recipe = Recipe(learning_rate=None, reference_batch=BATCH, input_range=None, seed=5)
    make_compiler(_with(train_step), recipe, (inputs, labels))
    assert set(seen) == {2}


def test_metrics_of_compile_are_those_of_all_samples() -> None:
    class Model(Compiled):
        def train_step(self, data: Any) -> Any:
            made = self.second(data)
            first = update_second(self, data)["loss"]
            self.compiled_metrics.update_state(tf.ones_like(made), made)
            return {metric.name: metric.result() for metric in self.metrics} | {"first": first}

    model, batch = Model(), samples(6)
    model.compile(metrics=["mean_absolute_error"])
    step = make_step(model)
    expected = float(np.mean(np.abs(1 - np.asarray(model.second(batch)))))
    metrics = step.metrics(step.alone(batch, np.zeros((6, 0), np.float32)))
    assert metrics["mean_absolute_error"] == pytest.approx(expected, rel=1e-5)
    assert "first" in metrics


LOOP = """
import keras
import tensorflow as tf

optimizer = keras.optimizers.Adam(0.02)
error = keras.metrics.MeanSquaredError(name="error")


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


@tf.function
def step(model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        made = model(x, training=True)
        loss = tf.reduce_mean(tf.square(made - y))
    update(model.trainable_variables, tape.gradient(loss, model.trainable_variables))
    error.update_state(y, made)
    return {"loss": loss}


def update(variables, gradients):
    optimizer.apply(gradients, variables)


def of_a_batch(batch):
    pass
"""


def loop_spec(directory: Path, name: str, step: str = "step", text: str = LOOP) -> BuildSpec:
    file = directory / f"{name}.py"
    file.write_text(text)
    return BuildSpec(f"{file}:build", {}, Recipe(), str(directory), (str(file),), step=f"{file}:{step}")


def test_function_of_a_custom_loop_is_the_step(tmp_path: Path) -> None:
    spec = loop_spec(tmp_path, "loop_of_ranks")
    info = build_model(BuildRequest(spec, str(tmp_path)))
    assert (info.has_own_step, info.recipe.learning_rate) == (True, pytest.approx(0.02))
    model = load(tmp_path / "architecture.json", tmp_path / "weights.npz")
    step = Step(model, info.recipe, (samples(0), np.zeros((0, 1), np.float32)))
    assert [layout.gradients.stop for layout in step.layouts] == [6 * 4 + 4 + 4 + 1, 0]
    loop_spec(tmp_path, "loop_alone")
    alone = import_file(tmp_path / "loop_alone.py")
    reference = alone.build()
    for number in range(3):
        batch = samples(BATCH, number), samples(BATCH, 9)[:, :1]
        step.set_step(number, info.recipe.learning_rate or 0.0)
        sums = step.alone(*batch)
        alone.error.reset_state()
        loss = float(alone.step(reference, tuple(map(tf.constant, batch)))["loss"])
        assert sums.mean_loss == pytest.approx(loss, rel=1e-5)
        # What is reported as the loss is not reported again.
        assert step.metrics(sums) == {"error": pytest.approx(float(alone.error.result()), rel=1e-5)}
    assert far(step.model, reference) < 1e-6


@pytest.mark.parametrize(
    ("step", "text", "words"),
    [
        ("of_a_batch", LOOP, r"takes \(batch\), expected \(model, batch\)"),
        ("step", LOOP.replace("optimizer.apply(gradients, variables)", "pass"), "no Keras optimizer"),
    ],
)
def test_function_that_is_no_step_is_refused(tmp_path: Path, step: str, text: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        build_model(BuildRequest(loop_spec(tmp_path, f"loop_that_{len(text)}", step, text), str(tmp_path)))


def test_embedding_has_a_gradient_of_known_size() -> None:
    words = keras.layers.Embedding(5, 3)
    words.build()

    def train_step(model: Any, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(words(tf.cast(data > 0, tf.int32))))
        model.first_optimizer.apply(tape.gradient(loss, words.trainable_variables), words.trainable_variables)
        return {"loss": loss}

    model = _with(train_step)
    model.words = words
    assert make_step(model).layouts[0].gradients.stop == 5 * 3


def test_model_that_keras_cannot_save_and_that_is_never_called_itself_has_its_weights_saved(
    tmp_path: Path,
) -> None:
    class Model(Pair):
        def call(self, inputs: Any) -> Any:
            return self.second(inputs)

        def get_config(self) -> Any:
            raise NotImplementedError

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    model.built = False
    saved = save_model(model, tmp_path / "model.keras")
    assert [saved] == [*tmp_path.iterdir()] == [tmp_path / "model.weights.h5"]
    before = weights_of(model.second)
    for variable in model.second.weights:
        variable.assign(variable * 0 + 7)
    model.load_weights(saved)
    assert all(map(np.array_equal, before, weights_of(model.second)))


def of_python(value: Any) -> Any:
    return tf.numpy_function(lambda number: number, [value], tf.float32)


Write = Callable[[Any, Any, Any], Any]
"""Writes a variable, given it, the batch and the model."""
WRITES: dict[str, tuple[Write, bool]] = {
    # The same on all ranks, though it was computed from what is not.
    "sum over ranks": (lambda x, _, model: x.assign_add(tf.reduce_sum(model.second.weights[0])), False),
    "Python's own": (lambda x, batch, _: x.assign(tf.reshape(of_python(batch[0, 0]), [])), True),
    "mean of the batch": (lambda x, batch, _: x.assign(0.9 * x + 0.1 * tf.reduce_mean(batch)), True),
    "size of the batch": (lambda x, batch, _: x.assign_add(tf.cast(tf.shape(batch)[0], tf.float32)), True),
    "condition on the batch": (
        lambda x, batch, _: x.assign(tf.cond(batch[0, 0] > 0, lambda: 1.0, lambda: 2.0)),
        True,
    ),
    "counter": (lambda x, *_: x.assign_add(1.0), False),
    "set anew": (lambda x, batch, _: (x.assign(batch[0, 0]), x.assign(3.0)), False),
    "in a condition": (
        lambda x, batch, _: tf.cond(batch[0, 0] > 0, lambda: x.assign_add(1.0), lambda: x.assign_add(0.0)),
        True,
    ),
    "slices": (lambda x, batch, _: x.assign(x[None][:1][0] + batch[0, 0]), True),
}


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
@pytest.mark.parametrize(("write", "differs"), WRITES.values(), ids=WRITES)
def test_what_depends_on_the_batch_differs_by_rank(write: Write, differs: bool, kind: Any) -> None:
    """Whatever is written, to Keras' variables and to TensorFlow's, is averaged only if it differs."""

    def step(model: Any, data: Any) -> Any:
        logs = update_second(model, data)
        write(model.written, data, model)
        return logs

    model = _with(step)
    model.written = kind(1.0)
    statistics = make_step(model).layout.statistics
    assert statistics.stop - statistics.start == differs
