"""A model in two parts computes what the whole one does: ranks as threads, messages through queues."""

import queue
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.worker.compute.compile import make_engine, trace_all
from csdctl.worker.compute.parts import time_parts
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.engine.split import PrefixStep, SplitStep, micro_batch_size, micro_batch_sizes
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import RankLostError, StepVoidError
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import SAMPLE_WEIGHT, DatasetInfo
from csdctl.worker.protocol.model_info import PartsSpec
from csdctl.worker.protocol.recipe import LossTerm, Recipe
from csdctl.worker.protocol.run_spec import Prefix, Runtime
from csdctl.worker.tasks.split import Exchange
from tests.patience import STALL_S, scaled
from tests.unit.worker.compute.built_models import Step, carry, keras

pytestmark = pytest.mark.first(3)

PARTS = (21, 34, 9)
"""Batch sizes of the ranks."""
WEIGHTS = (0.5, 1.0, 2.0)
"""Of the ranks' samples."""
NUM_MICRO_BATCHES = 4
TOLERANCE = 2e-6
"""Of a vector's parts, relative to their norm."""
Array = np.ndarray[Any, Any]


class QueueCommunicator:
    """The calls of a communicator that an exchange needs."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], "queue.Queue[bytes]"]) -> None:
        self.rank, self._queues = rank, queues

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        self._queues[self.rank, rank].put(bytes(content))

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytes:
        return self._queues[rank, self.rank].get(timeout=scaled(STALL_S))


def pictures() -> Any:
    layers = keras().layers
    inputs = keras().Input((9, 9, 3))
    x = layers.Conv2D(8, 3, kernel_regularizer="l2", name="stem")(inputs)
    x = layers.ReLU(name="before")(layers.BatchNormalization()(x))
    x = layers.Dropout(0.3)(x)
    y = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(layers.Add(name="join")([x, y]))
    x = layers.GlobalAveragePooling2D()(layers.Dropout(0.3)(x))
    return keras().Model(inputs, layers.Dense(5, activation="softmax", kernel_regularizer="l2")(x))


def nested() -> Any:
    """A base as a layer, called with training=False, as in transfer learning; its first layers are frozen."""
    layers = keras().layers
    source = x = keras().Input((9, 9, 3))
    for number in range(3):
        y = layers.Conv2D(8, 3, padding="same", use_bias=False, kernel_regularizer="l2")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        x = layers.Add(name=f"add{number}")([x, y]) if number else y
    base = keras().Model(source, layers.Dropout(0.3)(x), name="base")
    for layer in base.layers[:4]:
        layer.trainable = False
    inputs = keras().Input((9, 9, 3))
    x = layers.BatchNormalization()(base(layers.Rescaling(2.0)(inputs), training=False))
    x = layers.GlobalAveragePooling2D()(x)
    return keras().Model(inputs, layers.Dense(5, activation="softmax")(x))


def dense(policy: str | None = None, *, has_size: bool = False) -> Any:
    layers = keras().layers
    inputs = keras().Input((9, 9, 3))
    x = layers.Dense(12, activation="relu", name="cut", dtype=policy)(layers.Flatten()(inputs))
    kind = layers.Dense(5, activation="softmax", name="kind", dtype="float32")(x)
    return keras().Model(
        inputs, {"kind": kind, "size": layers.Dense(1, name="size")(x)} if has_size else kind
    )


def recommender() -> Any:
    layers = keras().layers
    inputs = {name: keras().Input((), dtype="int32", name=name) for name in ("user", "item")}
    vectors = [layers.Embedding(7, 4, name=f"of_{name}")(tensor) for name, tensor in inputs.items()]
    joined = layers.Concatenate(name="cut")(vectors)
    return keras().Model(inputs, layers.Dense(5, activation="softmax")(joined))


CLASSES = LossTerm("sparse_categorical_crossentropy")
SGD = Recipe(optimizer="sgd", optimizer_args={"momentum": 0.9}, learning_rate=0.1, losses={"": CLASSES})
ADAM = Recipe(optimizer="adam", learning_rate=0.01, losses={"": CLASSES}, metrics=("accuracy",))
IGNORED = replace(ADAM, losses={"": replace(CLASSES, args={"ignore_class": 0})})
TWO = Recipe(optimizer="adamw", learning_rate=0.01, losses={"kind": CLASSES, "size": LossTerm("mse")})
CASES: dict[str, tuple[Any, str, Recipe]] = {
    "batch norm, dropout, penalties, an ignored class": (pictures, "join", IGNORED),
    "inside of a nested model, behind its frozen part": (nested, "add1", ADAM),
    "two outputs": (lambda: dense(has_size=True), "cut", TWO),
    "two inputs": (recommender, "cut", ADAM),
    "early cut": (pictures, "before", SGD),
    "bfloat16": (lambda: dense("mixed_bfloat16"), "cut", SGD),
}


def samples_of(name: str, generator: np.random.Generator, count: int) -> Array:
    if name != "two inputs":
        return generator.random((count, 9, 9, 3), np.float32)
    samples = np.zeros(count, [("item", np.int32), ("user", np.int32)])
    samples["item"], samples["user"] = generator.integers(0, 7, (2, count))
    return samples


def labels_of(name: str, generator: np.random.Generator, count: int) -> Array:
    classes = generator.integers(0, 5, count).astype(np.int32)
    if name != "two outputs":
        return classes
    both = np.zeros(count, [("kind", np.int32), ("size", np.float32, (1,)), (SAMPLE_WEIGHT, np.float32)])
    both["kind"], both["size"] = classes, generator.random((count, 1))
    both[SAMPLE_WEIGHT] = generator.random(count)
    return both


def step_of_all(ranks: list[Any], batches: list[tuple[Array, Array]]) -> Array:
    """Return the sum of the vectors of all ranks, computed at the same time."""
    pairs = [pair for rank in range(len(ranks)) for pair in ((rank, 0), (0, rank))]
    queues: dict[tuple[int, int], queue.Queue[bytes]] = {pair: queue.Queue() for pair in pairs}
    sizes = [micro_batch_sizes(len(samples), NUM_MICRO_BATCHES) for samples, _ in batches]
    vectors = [np.zeros(rank.layout.step_size, np.float32) for rank in ranks]

    def on_node(number: int) -> None:
        exchange = Exchange(ranks[number], QueueCommunicator(number, queues), batches[number][1])  # type: ignore[arg-type]
        exchange.on_node(*batches[number], sizes[number], vectors[number])

    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(on_node, number) for number in range(1, len(ranks))]
        exchange = Exchange(ranks[0], QueueCommunicator(0, queues), batches[0][1])  # type: ignore[arg-type]
        exchange.on_host(*batches[0], range(len(ranks)), WEIGHTS, sizes, vectors[0])
    for node in nodes:
        node.result()
    return np.asarray(sum(vectors[1:], start=vectors[0]))


def compiled(build: Callable[[], Any], recipe: Recipe) -> Any:
    keras().utils.set_random_seed(3)
    model = build()
    compile_model(model, recipe)
    return model


def divided(
    build: Callable[[], Any], layer: str, recipe: Recipe, example: tuple[Array, Array]
) -> tuple[SplitStep, list[PrefixStep]]:
    """Return the steps of rank 0 and of the others."""
    of_host, of_ranks = trace_all(compiled(build, recipe), recipe, example, cut=layer, is_wide=False)
    host = SplitStep(make_engine(*of_host, weight=WEIGHTS[0]), weight=WEIGHTS[0])
    numbers = range(1, len(PARTS))
    return host, [PrefixStep(make_engine(*of_ranks, rank=rank), weight=WEIGHTS[rank]) for rank in numbers]


@pytest.mark.first(2)
@pytest.mark.parametrize("name", CASES)
def test_parts_take_the_steps_of_the_whole_model(name: str) -> None:
    build, layer, recipe = CASES[name]
    generator = np.random.default_rng(0)
    samples = [samples_of(name, generator, size) for size in PARTS]
    example = samples[0][:0], labels_of(name, generator, 0)
    single = Step(compiled(build, recipe), recipe, example)
    host, nodes = divided(build, layer, recipe, example)
    tolerance = 2e-2 if name == "bfloat16" else TOLERANCE
    for step in range(3):
        batches = [(part, labels_of(name, generator, len(part))) for part in samples]
        for rank in (host.engine, *(node.engine for node in nodes), single):
            rank.set_step(step, 0.01)
        host.begin()
        total = step_of_all([host, *nodes], batches)
        expected = np.zeros(single.layout.step_size, np.float32)
        for number, batch in enumerate(batches):
            single.position = step, number
            single.micro_batch_size = micro_batch_size(len(batch[0]), NUM_MICRO_BATCHES)
            expected += WEIGHTS[number] * np.asarray(single.local(*batch))
        vector = host.vector(total)
        layout = single.layout
        for part in (layout.gradients, layout.statistics, slice(layout.statistics.stop, None)):
            norm = float(np.linalg.norm(expected[part])) or 1.0
            assert np.linalg.norm(vector[part] - expected[part]) / norm < tolerance
        for rank in (host, *nodes):
            rank.apply(total)
        single.apply(vector)
        assert all(map(np.array_equal, single.values, host.engine.values))
        for node in nodes:
            assert all(map(np.array_equal, node.values, host.values))
            assert len(node.values) == len(host.values)


EXAMPLE = np.zeros((0, 9, 9, 3), np.float32), np.zeros(0, np.int32)


class Sends(Communicator):
    """Ranks that send `contents`, whatever is asked for; those without any are lost."""

    def __init__(self, *contents: bytes) -> None:
        super().__init__(0, ((1, 0),))
        self._contents = contents
        self.evicted: list[tuple[int, str]] = []

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytearray:
        if not self._contents[rank - 1]:
            raise RankLostError(rank)
        return bytearray(self._contents[rank - 1])

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        pass

    def evict(self, rank: int, reason: str) -> None:
        self.evicted.append((rank, reason))


def sent(value: float, label: int, size: int) -> bytes:
    return np.full((size, 7, 7, 8), value, np.float32).tobytes() + np.full(size, label, np.int32).tobytes()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (sent(np.nan, 1, 2), sent(1.0, 1, 2), "sent activations or labels that are not finite"),
        (sent(1.0, 99, 2), sent(1.0, 1, 2), "sent data that the model cannot take: TensorFlowError: "),
        (sent(1.0, 1, 3), sent(1.0, 1, 2), r"sent \d+ bytes of activations, expected \d+"),
        (sent(1.0, 1, 2), b"", ""),
    ],
    ids=["not finite", "no such class", "too long", "lost"],
)
def test_what_a_rank_sends_is_its_own_fault_and_a_lost_one_is_not(
    first: bytes, second: bytes, reason: str
) -> None:
    host, _ = divided(pictures, "join", SGD, EXAMPLE)
    ranks = Sends(first, second)
    with pytest.raises(StepVoidError):
        on_host(host, ranks)
    assert [rank for rank, _ in ranks.evicted] == ([1] if reason else [])
    assert all(re.match(reason, why) for _, why in ranks.evicted)


def on_host(host: SplitStep, ranks: Sends) -> Array:
    """Return the vector of the model after a step of rank 0 without samples and of two ranks with 2 each."""
    out = np.zeros(host.layout.step_size, np.float32)
    Exchange(host, ranks, EXAMPLE[1]).on_host(*EXAMPLE, [0, 1, 2], [1.0] * 3, [[], [2], [2]], out)
    return host.vector(out)


def test_diverging_training_is_no_ranks_fault() -> None:
    host, _ = divided(pictures, "join", SGD, EXAMPLE)
    assert not np.isfinite(on_host(host, Sends(*[sent(np.inf, 1, 2)] * 2))).all(), "the sum shows it"


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((40, 4), [10] * 4), ((8, 2, 3), [3, 3, 2]), ((10, 4), [8, 2]), ((0, 4), []), ((3, 4), [3])],
)
def test_micro_batches_are_of_one_size_but_the_last(sizes: tuple[int, ...], expected: list[int]) -> None:
    assert micro_batch_sizes(*sizes) == expected


@pytest.mark.parametrize(
    ("cut", "recipe", "message"),
    [
        ("nowhere", SGD, "cannot be cut after 'nowhere'; its cuts: stem, "),
        ("join", replace(SGD, optimizer_args={"global_clipnorm": 1.0}), "clips by the norm of the whole"),
    ],
)
def test_model_that_cannot_be_divided_says_why(cut: str, recipe: Recipe, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        divided(pictures, cut, recipe, EXAMPLE)


DATA = DatasetInfo("d", 100, (24, 24, 3), "uint8", (), 3, "f" * 32)


def build() -> Any:
    """Nearly all work is before the layer 'late', and nearly none before 'early'."""
    layers = keras().layers
    inputs = keras().Input((24, 24, 3))
    x = layers.Rescaling(1 / 255, name="early")(inputs)
    for width in (32, 48, 48):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D(name="late")(x)
    return keras().Model(inputs, layers.Dense(4, activation="softmax")(x))


def test_parts_of_a_step_are_what_is_before_and_behind_the_cut(tmp_path: Path) -> None:
    """Of a cut that cannot be made, the reason is told."""
    recipe = Recipe(learning_rate=0.01)
    architecture, weights = carry(build(), tmp_path, recipe)
    cuts, prefix = ("early", "nowhere", "late"), Prefix(architecture, weights, None)
    spec = PartsSpec(architecture, weights, recipe, Runtime(), DATA, 16, cuts, prefix, min_duration_s=0.5)
    times = time_parts(spec)
    early, late = times.cuts
    assert (early.layer, late.layer) == ("early", "late")
    assert "cannot be cut after 'nowhere'" in times.why_not
    assert early.head_s > early.forward_s + early.backward_s
    assert late.forward_s + late.backward_s > late.head_s
    assert min(times.step_s, times.evaluation_s, times.features_s) > 0
