"""Learning rate of a step: scaled by the global batch, warmed up, capped and decayed. Pure."""

import math

from csdctl.worker.protocol.recipe import Recipe


def learning_rate(
    recipe: Recipe, global_batch: int, epochs_done: float, scheduled: float | None = None
) -> float:
    """Return the rate after `epochs_done` epochs, such as 1.25, at `global_batch` samples per step.

    `scheduled` takes the place of the recipe's rate: that of its schedule at this step.

    Linear scaling lr · N / reference_batch, ramped up from lr during the warm-up (Goyal et al. 2017, 2.1–2.2;
    paper, section IV), capped at the recipe's maximum, and decayed to zero as the recipe's `decay` says
    (cosine: Loshchilov and Hutter 2017, equation 5, without restarts).
    """
    initial = recipe.learning_rate if scheduled is None else scheduled
    assert initial is not None, "the recipe has been resolved with its model"
    target = initial * global_batch / recipe.reference_batch
    if recipe.max_learning_rate is not None:
        target = min(target, recipe.max_learning_rate)
    if epochs_done >= recipe.warmup_epochs:
        return target * decay(recipe, epochs_done)
    return initial + (target - initial) * epochs_done / recipe.warmup_epochs


def decay(recipe: Recipe, epochs_done: float) -> float:
    """Return the factor of the learning rate after `epochs_done` epochs, from 1 down to 0."""
    num_decaying = recipe.epochs - recipe.warmup_epochs
    if recipe.decay == "none" or num_decaying <= 0:
        return 1.0
    done = min(1.0, max(0.0, (epochs_done - recipe.warmup_epochs) / num_decaying))
    return 1.0 - done if recipe.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
