"""Program run by test_noise.py: saves steps of a small model with and without noise."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute import noise
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import find_stateful_layers
from csdctl.worker.compute.noise import secret_normal
from csdctl.worker.compute.recipe import compile_model
from csdctl.worker.compute.step import Step
from csdctl.worker.protocol.recipe import Noise, Recipe

CLIP = 3.2
NO_NOISE = 1e-12
"""A multiplier so small that the clipped sum is unchanged."""
PENALTY = 0.01
directory = Path(sys.argv[1])
tf, keras = load_backend()
layers = keras.layers
generator = np.random.default_rng(5)
images = generator.random((12, 6, 6, 1), np.float32)
labels = generator.integers(0, 4, 12).astype(np.int32)
recipe = Recipe(learning_rate=0.1)


def build(penalty: float | None = None, activity: float | None = None) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(5, 3, kernel_regularizer=keras.regularizers.L2(penalty) if penalty else None),
            layers.Flatten(),
            layers.Dense(
                4,
                activation="softmax",
                activity_regularizer=keras.regularizers.L2(activity) if activity else None,
            ),
        ]
    )


def step(multiplier: float | None, *, clip: float = CLIP, model: Any = None, **options: Any) -> Step:
    wanted = None if multiplier is None else Noise(clip, multiplier, 1e-5)
    model = model or build()
    compile_model(model, recipe, keras)
    return Step(model, recipe, (images, labels), tf, keras, noise=wanted, **options)


def naive(count: int, **model: Any) -> np.ndarray[Any, Any]:
    """Return the float64 sum of clipped gradients of single samples, from the step without noise."""
    plain, total = step(None, model=build(**model)), 0.0
    for number in range(count):
        one = slice(number, number + 1)
        gradient = np.array(plain.local(images[one], labels[one]), np.float64)[: plain.layout.num_gradients]
        norm = np.linalg.norm(gradient)
        norms.append(norm)
        total = total + gradient * min(1.0, CLIP / norm)
    return np.asarray(total)


norms: list[float] = []
ones = np.ones(7, np.int64)
out: dict[str, Any] = {"naive": naive(12), "naive_activity": naive(12, activity=0.5), "naive_of_7": naive(7)}
out["norms"] = norms[:12]
every = np.ones(12, np.int64)
out["clipped"] = step(NO_NOISE).local(images, labels, private_copies=every)
out["clipped_activity"] = step(NO_NOISE, model=build(activity=0.5)).local(
    images, labels, private_copies=every
)
out["clipped_penalty"] = step(NO_NOISE, model=build(penalty=PENALTY)).local(
    images, labels, private_copies=every
)
out["kernel"] = build(penalty=PENALTY).layers[0].kernel.numpy().reshape(-1)

out["mixed"] = step(NO_NOISE).local(images, labels, private_copies=ones)
out["mixed_micro_batches"] = step(NO_NOISE, micro_batch_size=2).local(images, labels, private_copies=ones)
out["mixed_weight"] = step(NO_NOISE, weight=0.25).local(images, labels, private_copies=ones)
out["public_of_5"] = step(None).local(images[7:], labels[7:])
out["whole"] = step(None).local(images, labels)
out["whole_of_a_rank_without_private"] = step(1.0).local(images, labels)

twice = [np.concatenate([array[:4], array[:4]]) for array in (images, labels)]
out["twice"] = step(NO_NOISE, clip=1e-3).local(*twice, private_copies=np.full(8, 2))
out["once"] = step(NO_NOISE, clip=1e-3).local(images[:4], labels[:4], private_copies=np.ones(4, np.int64))

spoilt = images.copy()
spoilt[3] = np.inf
out["spoilt"] = step(NO_NOISE).local(spoilt, labels, private_copies=every)

alone, summed = step(1e-9), step(1e-9)
alone.alone(images, labels)
summed.apply(summed.local(images, labels))
out["alone"], out["summed"] = (
    np.concatenate([w.ravel() for w in s.model.get_weights()]) for s in (alone, summed)
)
only = step(NO_NOISE)
sums = only.apply(only.local(images, labels, private_copies=every))
out["sums_of_private_only"] = [sums.loss, sums.count]
out["weights_of_private_only"] = np.concatenate([w.ravel() for w in only.model.get_weights()])
out["weights_before"] = np.concatenate([w.ravel() for w in build().get_weights()])

noisy = step(3.0)
out["noise"] = np.concatenate(
    [noisy.local(images, labels, private_copies=every) - out["clipped"] for _ in range(400)]
).reshape(400, -1)[:, : noisy.layout.num_gradients]
out["normal"] = secret_normal(1_000_001)
# Of a vector longer than a chunk of noise; of a rank whose samples have a weight, in micro-batches.
noise.CHUNK = 100
out["chunks"] = step(NO_NOISE).local(images, labels, private_copies=every)
light = step(3.0, weight=0.25, micro_batch_size=2)
quiet = 0.25 * out["clipped"]
out["noise_of_weighted"] = np.concatenate(
    [light.local(images, labels, private_copies=every) - quiet for _ in range(100)]
).reshape(100, -1)[:, : light.layout.num_gradients]
np.savez(directory / "out.npz", **out)

backbone = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()])
frozen = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(trainable=False)])
frozen.layers[0].trainable = False
named = {
    "batch norm": backbone,
    "nested": keras.Sequential([keras.Input((4,)), backbone, layers.Dense(2)]),
    "spectral": keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(layers.Dense(2))]),
    "stateful": keras.Sequential(
        [keras.Input(batch_shape=(1, 3, 2)), layers.LSTM(2, stateful=True), layers.Dense(2)]
    ),
    "frozen": keras.models.model_from_json(frozen.to_json()),
    "fixed": keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Normalization(mean=0.5, variance=1.0),
            layers.RandomFlip(),
            layers.GroupNormalization(3),
            layers.LayerNormalization(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    ),
}
for name, model in named.items():
    print(f"{name}: {len(find_stateful_layers(model, keras))}")
