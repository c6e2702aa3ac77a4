"""Check the files of a run that was started earlier: they may have been edited, or come from a stranger.

`Manifest` has the fields that csdctl reads, and checks that they belong together.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from csdctl.errors import InputError
from csdctl.job.model import NoiseEntry
from csdctl.placement.equation1 import Placed
from csdctl.tuning.plan import MAX_BATCH_SIZE, Machine, Plan

Samples = Annotated[int, Field(ge=0, le=10**15)]


class _Part(BaseModel):
    """A part of the manifest; keys that nothing reads may be there too."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Shard(_Part):
    """The shard of one rank: a `Placed`."""

    name: Machine
    batch_size: Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)]
    num_private: Samples
    public_start: Samples
    public_stop: Samples
    num_repeated: Samples = 0

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.public_stop < self.public_start:
            raise ValueError(f"public_stop {self.public_stop} is before public_start {self.public_start}")
        if self.num_repeated > self.num_private:
            raise ValueError(f"num_repeated {self.num_repeated} is above num_private {self.num_private}")
        return self


class Placement(_Part):
    """The numbers of samples of one rank."""

    node: Machine
    num_private: Samples
    num_public: Samples


class DataFingerprints(_Part):
    """Fingerprints of the prepared data; private data by node."""

    public: str
    private: dict[str, str] = {}


class Manifest(_Part):
    """The content of manifest.json that csdctl reads."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    plan: Plan
    placed: list[Shard]
    placement: list[Placement]
    data: DataFingerprints
    noise: NoiseEntry | None = None
    predicted_samples_per_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _describes_one_run(self) -> Self:
        position = 0
        if not len(self.plan.ranks) == len(self.placed) == len(self.placement):
            raise ValueError("plan.ranks, placed and placement have different numbers of ranks")
        for rank, shard, counts in zip(self.plan.ranks, self.placed, self.placement, strict=True):
            if not rank.node == shard.name == counts.node:
                raise ValueError(
                    f"plan.ranks has {rank.node} where placed has {shard.name}, placement {counts.node}"
                )
            if rank.batch_size != shard.batch_size:
                raise ValueError(
                    f"placed: batch_size of {shard.name} is {shard.batch_size}, in plan {rank.batch_size}"
                )
            if shard.public_start != position:
                raise ValueError(
                    f"placed: public_start of {shard.name} is {shard.public_start}, expected {position}"
                )
            position = shard.public_stop
            if (counts.num_private, counts.num_public) != (shard.num_private, position - shard.public_start):
                raise ValueError(f"placement: the samples of {counts.node} are not those in placed")
        return self

    def shards(self) -> list[Placed]:
        """Return the shards in order of rank."""
        return [Placed(**shard.model_dump()) for shard in self.placed]


def check_links(directory: Path) -> None:
    """Raise InputError for a symbolic link in a run's directory: csdctl writes none, and would follow it."""
    for parent, directories, files in os.walk(directory):
        for name in (".", *directories, *files):
            path = Path(parent, name)
            if path.is_symlink():
                raise InputError(
                    f"{path} is a symbolic link, which csdctl does not create in a run",
                    remedy="replace it with the file itself, or remove it",
                )
