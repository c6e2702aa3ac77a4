"""The learning rate of every step: scaled by the global batch, warmed up, capped, falling; pure."""

import math

from csdctl.worker.protocol.recipe import Recipe


def learning_rate(recipe: Recipe, global_batch: int, epochs_done: float) -> float:
    """The rate after `epochs_done` epochs, such as 1.25, at `global_batch` samples a step.

    Linear scaling lr · N / reference_batch, ramped from lr over the warm-up (Goyal et al. 2017, 2.1–2.2;
    paper, section IV), not above the recipe's cap, and falling to zero as the recipe's `decay` says
    (cosine: Loshchilov and Hutter 2017, equation 5, without restarts).
    """
    target = recipe.learning_rate * global_batch / recipe.reference_batch
    if recipe.max_learning_rate is not None:
        target = min(target, recipe.max_learning_rate)
    if epochs_done >= recipe.warmup_epochs:
        return target * decay(recipe, epochs_done)
    return recipe.learning_rate + (target - recipe.learning_rate) * epochs_done / recipe.warmup_epochs


def decay(recipe: Recipe, epochs_done: float) -> float:
    """The share of the learning rate that is left after `epochs_done` epochs, 1…0."""
    falling = recipe.epochs - recipe.warmup_epochs
    if recipe.decay == "none" or falling <= 0:
        return 1.0
    done = min(1.0, max(0.0, (epochs_done - recipe.warmup_epochs) / falling))
    return 1.0 - done if recipe.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
