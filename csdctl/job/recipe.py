"""The recipe of job.yaml: pydantic models, and the Recipe that the ranks get."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from csdctl.documents import Document
from csdctl.worker.protocol.recipe import Argument, EarlyStopping, LossTerm, Recipe, ReduceOnPlateau

ValueT = TypeVar("ValueT")
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _own_name(monitor: str) -> str:
    """Return the name of a metric; Keras calls that of the validation data val_accuracy."""
    return f"validation_{monitor.removeprefix('val_')}" if monitor.startswith("val_") else monitor


Monitor = Annotated[str, AfterValidator(_own_name)]
Mode = Literal["auto", "min", "max"]
NumEpochs = Annotated[int, Field(ge=0, le=1_000_000)]


class EarlyStoppingEntry(Document):
    """End the run when the metric stops improving."""

    monitor: Monitor = "validation_loss"
    patience: NumEpochs = 5
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    mode: Mode = "auto"
    baseline: Annotated[float, Field(allow_inf_nan=False)] | None = None
    start_from_epoch: NumEpochs = 0


class ReduceOnPlateauEntry(Document):
    """Lower the learning rate when the metric stops improving."""

    monitor: Monitor = "validation_loss"
    patience: NumEpochs = 3
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    min_delta: Annotated[float, Field(ge=0)] = 0.0001
    min_factor: Annotated[float, Field(gt=0, le=1)] = 0.0001
    mode: Mode = "auto"
    cooldown: NumEpochs = 0


class LossEntry(Document):
    """A loss with its arguments and, of several, its weight."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    weight: Weight = 1.0
    __pydantic_extra__: dict[str, float | bool | str] = Field(init=False)


class ScheduleEntry(Document):
    """A schedule of the learning rate by its Keras name, with its arguments."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
    __pydantic_extra__: dict[str, float | bool | str | list[float]] = Field(init=False)


class ClipEntry(Document):
    """A limit of the mean gradient over all ranks: of its norm, of each variable's norm, or of each value."""

    global_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(limit is not None for limit in (self.global_norm, self.norm, self.value)) != 1:
            raise ValueError("expected one of global_norm, norm and value")
        return self


class FreezeEntry(Document):
    """Layers that are not trained: this one, and all that lead to it."""

    until: Annotated[str, Field(min_length=1)]


LossName = Annotated[str, Field(min_length=1)]


class RecipeEntry(Document):
    """How to train. Loss, optimizer, learning rate and metrics may be left to a compiled model."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleEntry | None = None
    reference_batch: Annotated[int, Field(ge=1, le=1 << 30)] = 256
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    optimizer: str = ""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    optimizer_args: dict[str, float | bool] = {}
    clip: ClipEntry | None = None
    weight_decay: Weight | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    accumulation_steps: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    loss: LossName | LossEntry | dict[str, LossName | LossEntry] | None = None
    from_logits: bool = False
    class_weight: dict[Annotated[str, Field(pattern=r"^[0-9]{1,6}$")], Weight] = {}
    freeze: FreezeEntry | None = None
    views: Annotated[int, Field(ge=0, le=1000)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_learning_rate: Annotated[float, Field(gt=0)] | None = None
    decay: Literal["none", "linear", "cosine"] = "none"
    metrics: list[Annotated[str, Field(min_length=1)]] = []
    early_stopping: EarlyStoppingEntry | None = None
    reduce_on_plateau: ReduceOnPlateauEntry | None = None

    @field_validator("optimizer_args")
    @classmethod
    def _finite_arguments(cls, value: dict[str, float | bool]) -> dict[str, float | bool]:
        for name, argument in value.items():
            if not math.isfinite(argument):
                raise ValueError(f"{name} must be a finite number")
        return value

    @field_validator("learning_rate", "warmup_epochs")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.schedule and (self.learning_rate is not None or self.decay != "none"):
            raise ValueError("schedule takes the place of learning_rate and decay: remove them")
        return self


SAME = {
    *("epochs", "optimizer", "learning_rate", "reference_batch", "warmup_epochs", "from_logits"),
    *("class_weight", "views", "seed", "max_learning_rate", "decay"),
}
"""Keys that a rank gets as they are written."""


def build_recipe(
    entry: RecipeEntry, input_range: tuple[float, float] | None, own: Callable[[str], str]
) -> Recipe:
    """Return the recipe; `own` completes the paths of the user's own losses and metrics."""
    return Recipe(
        **entry.model_dump(include=SAME),
        optimizer_args=_optimizer_args(entry),
        losses={name: _loss_term(loss, own) for name, loss in _losses_of(entry).items()},
        input_range=input_range,
        freeze_until=entry.freeze.until if entry.freeze else "",
        schedule=_schedule(entry.schedule),
        metrics=tuple(own(metric) for metric in entry.metrics),
        early_stopping=values_of(EarlyStopping, entry.early_stopping),
        reduce_on_plateau=values_of(ReduceOnPlateau, entry.reduce_on_plateau),
    )


def _optimizer_args(entry: RecipeEntry) -> dict[str, Argument]:
    """Return the optimizer's keyword arguments, by Keras' names."""
    arguments: dict[str, Argument] = dict(entry.optimizer_args)
    if entry.momentum is not None:
        arguments["momentum"] = entry.momentum
    if entry.clip:
        names = {"global_norm": "global_clipnorm", "norm": "clipnorm", "value": "clipvalue"}
        arguments |= {
            names[name]: limit for name, limit in entry.clip.model_dump().items() if limit is not None
        }
    if entry.weight_decay is not None:
        arguments["weight_decay"] = entry.weight_decay
    if entry.ema is not None:
        arguments |= {"use_ema": True, "ema_momentum": entry.ema}
    if entry.accumulation_steps > 1:
        arguments["gradient_accumulation_steps"] = entry.accumulation_steps
    return arguments


def _losses_of(entry: RecipeEntry) -> Mapping[str, str | LossEntry]:
    if entry.loss is None:
        return {}
    return entry.loss if isinstance(entry.loss, dict) else {"": entry.loss}


def _loss_term(loss: str | LossEntry, own: Callable[[str], str]) -> LossTerm:
    if isinstance(loss, str):
        return LossTerm(own(loss))
    return LossTerm(own(loss.name), dict(loss.model_extra or {}), loss.weight)


def _schedule(entry: ScheduleEntry | None) -> str:
    """Return the schedule as Keras serializes it."""
    if entry is None:
        return ""
    config = {"class_name": entry.name, "config": dict(entry.model_extra or {})}
    return json.dumps(config, sort_keys=True)


def values_of(target: type[ValueT], entry: Document | None) -> ValueT | None:
    """Return `entry` as the dataclass `target` with the same fields; None without one."""
    return None if entry is None else target(**entry.model_dump())
