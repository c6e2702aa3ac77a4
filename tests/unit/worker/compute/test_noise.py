"""Clipping and noise of private samples, against a naive computation sample by sample."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).parent / "noise_program.py"
NUM_SUMS = 5
"""Loss, accuracy, number of public samples, number of samples, at the end of a vector with noise."""
TOLERANCE = 1e-5
MULTIPLIER, CLIP, PENALTY = 3.0, 3.2, 0.01
Out = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Out, dict[str, int]]:
    directory = tmp_path_factory.mktemp("noise")
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory)], capture_output=True, text=True, env=quiet, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    layers = {line.split(": ")[0]: int(line.split(": ")[1]) for line in done.stdout.splitlines()}
    return dict(np.load(directory / "out.npz")), layers


@pytest.fixture
def out(program: tuple[Out, dict[str, int]]) -> Out:
    return program[0]


def is_near(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected))


def test_every_private_sample_is_clipped_separately_over_all_variables(out: Out) -> None:
    assert out["norms"].min() < CLIP < out["norms"].max(), "the test needs samples above and below the limit"
    assert is_near(out["clipped"][:-NUM_SUMS], out["naive"])


def test_activity_loss_of_a_sample_is_clipped_with_it(out: Out) -> None:
    assert is_near(out["clipped_activity"][:-NUM_SUMS], out["naive_activity"])


def test_weight_penalty_is_not_clipped_and_counts_for_every_sample(out: Out) -> None:
    added = (out["clipped_penalty"] - out["clipped"])[: len(out["kernel"])]
    assert np.allclose(added, 12 * 2 * PENALTY * out["kernel"], atol=1e-4)


def test_loss_and_metrics_exclude_private_samples(out: Out) -> None:
    loss, right, of, num_public, count = out["mixed"][-NUM_SUMS:]
    assert (loss, right, of, num_public) == pytest.approx(tuple(out["public_of_5"][-4:]))
    assert count == 12
    assert tuple(out["clipped"][-NUM_SUMS:]) == (0, 0, 0, 0, 12)
    assert is_near(out["mixed"][:-NUM_SUMS], out["naive_of_7"] + out["public_of_5"][:-4])


def test_micro_batches_and_weights_do_not_change_clipping(out: Out) -> None:
    assert is_near(out["mixed_micro_batches"], out["mixed"])
    assert is_near(out["mixed_weight"], 0.25 * out["mixed"])


def test_rank_without_private_samples_computes_the_same_as_without_noise(out: Out) -> None:
    found = out["whole_of_a_rank_without_private"]
    assert np.array_equal(found[:-NUM_SUMS], out["whole"][:-4])
    assert found[-1] == found[-2] == out["whole"][-1] == 12


def test_sample_that_occurs_twice_in_a_batch_counts_once(out: Out) -> None:
    assert is_near(out["twice"][:-NUM_SUMS], out["once"][:-NUM_SUMS])
    assert out["twice"][-1] == 8


def test_gradient_that_is_not_finite_counts_as_zero(out: Out) -> None:
    assert np.isfinite(out["spoilt"]).all()
    difference = out["spoilt"] - out["clipped"]
    assert 0 < np.linalg.norm(difference[:-NUM_SUMS]) <= CLIP * (1 + TOLERANCE)


def test_single_rank_takes_the_same_step(out: Out) -> None:
    assert np.array_equal(out["alone"], out["summed"])


def test_step_of_only_private_samples_is_applied_and_has_no_loss(out: Out) -> None:
    assert tuple(out["sums_of_private_only"]) == (0, 0)
    moved = out["weights_of_private_only"] - out["weights_before"]
    assert np.allclose(moved, -0.1 * out["naive"] / 12, atol=1e-6)


def test_noise_has_the_stated_standard_deviation_and_differs_in_every_step(out: Out) -> None:
    # 400 steps × more than 300 elements: the estimate is within 0.2%, 2% is ten times that.
    noise = out["noise"]
    assert noise.size > 100_000
    assert noise.std() == pytest.approx(MULTIPLIER * CLIP, rel=0.02)
    assert abs(noise.mean()) < 0.03 * MULTIPLIER * CLIP
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.5
    assert len(np.unique(noise[:, 0])) > 390


def test_noise_has_the_weight_of_the_samples_and_is_drawn_once_for_a_step(out: Out) -> None:
    noise = out["noise_of_weighted"]
    assert noise.std() == pytest.approx(0.25 * MULTIPLIER * CLIP, rel=0.03)
    assert noise.std(axis=0).min() > 0.1 * MULTIPLIER * CLIP
    assert is_near(out["chunks"], out["clipped"])


def test_secret_numbers_are_normal(out: Out) -> None:
    normal = out["normal"]
    assert len(normal) == 1_000_001
    assert np.isfinite(normal).all()
    assert (normal.mean(), normal.std()) == (pytest.approx(0, abs=0.01), pytest.approx(1, rel=0.01))
    for limit, share in ((1.0, 0.31731), (2.0, 0.04550), (3.0, 0.00270)):
        assert (np.abs(normal) > limit).mean() == pytest.approx(share, abs=0.002)
    assert (normal > 0).mean() == pytest.approx(0.5, abs=0.01)


def test_stateful_layers_are_found(program: tuple[Out, dict[str, int]]) -> None:
    assert program[1] == {
        "batch norm": 1,
        "nested": 1,
        "spectral": 1,
        "stateful": 1,
        "frozen": 0,
        "fixed": 0,
    }
