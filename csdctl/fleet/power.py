"""`power` in fleet.yaml: where the power of a machine is read."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from csdctl.documents import Document
from csdctl.fleet.model import PowerSource

SourceName = Literal["rapl", "ipmi", "redfish", "hwmon", "nvidia-smi", "csv", "constant"]
Watts = Annotated[float, Field(ge=0, le=1_000_000)]
OneLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$", max_length=500)]
NEEDED = {"redfish": "url", "hwmon": "path", "csv": "path", "constant": "watts"}
"""The key that a source cannot do without."""
ALLOWED = {
    "redfish": {"url", "credentials", "certificate"},
    "hwmon": {"path"},
    "csv": {"path"},
    "constant": {"watts"},
}


class PowerEntry(Document):
    """`power` in fleet.yaml: a source with its settings. A name alone is a source, a number a constant."""

    source: SourceName
    path: OneLine = ""
    url: Annotated[str, Field(pattern=r"^(https?://[^\s\x00-\x1f]+)?$", max_length=500)] = ""
    credentials: Path | None = None
    certificate: Path | None = None
    watts: Watts | None = None
    idle_watts: Watts | None = None
    includes_nodes: bool = False

    @model_validator(mode="after")
    def _has_what_its_source_needs(self) -> Self:
        needed = NEEDED.get(self.source, "")
        if needed and getattr(self, needed) in ("", None):
            raise ValueError(f"source {self.source} needs `{needed}`")
        given = {key for key in ("path", "url", "credentials", "certificate", "watts") if getattr(self, key)}
        if others := sorted(given - ALLOWED.get(self.source, set())):
            raise ValueError(f"source {self.source} does not use `{others[0]}`")
        return self

    def resolve(self, directory: Path) -> PowerSource:
        """Return the source; paths of files on the host are relative to `directory`, that of fleet.yaml."""
        values: dict[str, Any] = self.model_dump()
        for key in ("credentials", "certificate"):
            if values[key] is not None:
                values[key] = directory / values[key]
        if self.source == "csv":
            values["path"] = str(directory / self.path)
        return PowerSource(**values)


def _expand(value: object) -> object:
    if isinstance(value, str):
        return {"source": value}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"source": "constant", "watts": value}
    return value


Power = Annotated[PowerEntry, BeforeValidator(_expand)]


def render_power(power: PowerSource) -> object:
    """Return `power` as fleet.yaml has it."""
    content = {key: value for key, value in vars(power).items() if value not in ("", None, False)}
    content |= {key: str(value) for key, value in content.items() if isinstance(value, Path)}
    return power.source if content == {"source": power.source} else content
