"""The recipe of job.yaml: pydantic models, and the Recipe that the ranks get."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from csdctl.documents import Document
from csdctl.worker.protocol.recipe import Argument, EarlyStopping, LossTerm, Recipe, ReduceOnPlateau

Weight = Annotated[float, Field(ge=0)]
MonitorT = TypeVar("MonitorT", EarlyStopping, ReduceOnPlateau)


def _own_name(entry: MonitorT) -> MonitorT:
    """Return `entry` with our name of its metric; Keras calls that of the validation data val_accuracy."""
    keras, metric = entry.monitor[:4], entry.monitor[4:]
    return replace(entry, monitor=f"validation_{metric}") if keras == "val_" else entry


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

    global_norm: Annotated[float, Field(gt=0)] | None = None
    norm: Annotated[float, Field(gt=0)] | None = None
    value: Annotated[float, Field(gt=0)] | None = None

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
    early_stopping: Annotated[EarlyStopping, AfterValidator(_own_name)] | None = None
    reduce_on_plateau: Annotated[ReduceOnPlateau, AfterValidator(_own_name)] | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.schedule and (self.learning_rate is not None or self.decay != "none"):
            raise ValueError("schedule takes the place of learning_rate and decay: remove them")
        return self


def build_recipe(
    entry: RecipeEntry, input_range: tuple[float, float] | None, own: Callable[[str], str]
) -> Recipe:
    """Return the recipe; `own` completes the paths of the user's own losses and metrics."""
    names = {field.name for field in fields(Recipe)} & RecipeEntry.model_fields.keys()
    return replace(
        Recipe(**{name: getattr(entry, name) for name in names}),
        optimizer_args=_optimizer_args(entry),
        losses={name: _loss_term(loss, own) for name, loss in _losses_of(entry).items()},
        input_range=input_range,
        freeze_until=entry.freeze.until if entry.freeze else "",
        schedule=_schedule(entry.schedule),
        metrics=tuple(own(metric) for metric in entry.metrics),
    )


def _optimizer_args(entry: RecipeEntry) -> dict[str, Argument]:
    """Return the optimizer's keyword arguments, by Keras' names."""
    steps, clip = entry.accumulation_steps, entry.clip or ClipEntry.model_construct()
    named = {
        "momentum": entry.momentum,
        "global_clipnorm": clip.global_norm,
        "clipnorm": clip.norm,
        "clipvalue": clip.value,
        "weight_decay": entry.weight_decay,
        "use_ema": True if entry.ema else None,
        "ema_momentum": entry.ema,
        "gradient_accumulation_steps": steps if steps > 1 else None,
    }
    return {**entry.optimizer_args, **{name: value for name, value in named.items() if value is not None}}


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
