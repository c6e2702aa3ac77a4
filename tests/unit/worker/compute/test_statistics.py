"""Moving statistics of ranks whose batches have other means and sizes."""

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.statistics import MovingStatistics


def test_merged_statistics_are_those_of_the_pooled_batch() -> None:
    tf, keras = load_backend()
    generator = np.random.default_rng(5)
    parts = [
        generator.normal(mean, 1 + abs(mean), (size, 3)) for mean, size in ((0.0, 12), (4.0, 5), (-2.0, 3))
    ]
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.7)])
    statistics = MovingStatistics(model, tf, keras)
    total = np.zeros(statistics.size)
    for part in parts:
        before = statistics.read()
        model(part.astype(np.float32), training=True)
        changes = statistics.take_changes(before, np.float32(len(part)))
        total += np.concatenate([np.asarray(change) for change in changes])
    statistics.apply_changes(tf.constant((total / sum(map(len, parts))).astype(np.float32)))
    pooled = np.concatenate(parts)
    mean, variance = (np.asarray(variable) for variable in statistics.variables)
    np.testing.assert_allclose(mean, 0.3 * pooled.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.7 + 0.3 * pooled.var(axis=0), rtol=1e-5)
