"""All that a report of a run shows: its numbers, its series, its bytes and its machines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from csdctl.reporting.energy import RunEnergy, add_up_energy
from csdctl.reporting.privacy import Flow
from csdctl.reporting.series import RunSeries, SeriesBuilder
from csdctl.reporting.summary import RunSummary, summarize
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import read_power
from csdctl.worker.protocol.events import Event

MEASURED, PREDICTED, EMULATED, STATED = "measured", "predicted", "measured, emulated fleet", "stated"
"""Where a number is from."""


@dataclass(frozen=True)
class RunResults:
    """One run."""

    summary: RunSummary
    series: RunSeries
    flows: list[Flow]
    """Bytes of the run, from the ledger."""
    manifest: dict[str, Any]

    @property
    def measured(self) -> str:
        """What a measurement of this run is called."""
        return EMULATED if self.is_emulated else MEASURED

    @property
    def is_emulated(self) -> bool:
        """Whether the fleet was emulated."""
        fleet = self.manifest.get("fleet")
        return self.summary.emulated or (isinstance(fleet, dict) and bool(fleet.get("emulated")))


def read_results(run: RunDirectory, flows: list[Flow]) -> RunResults:
    """Add up the events of a run in one pass; raises InputError for a run without any."""
    manifest: Any = run.load_manifest()
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    builder, events = SeriesBuilder(nodes), run.read_events(nodes)

    def passing() -> Iterator[Event]:
        for time_s, event in events.with_times(builder.add_spent):
            builder.add(time_s, event)
            yield event

    summary = replace(summarize(run.run_id, manifest, passing()), num_unreadable=events.num_unreadable)
    series = builder.build()
    return RunResults(replace(summary, energy=_energy(run, series)), series, flows, manifest)


def _energy(run: RunDirectory, series: RunSeries) -> RunEnergy | None:
    """Return what the machines spent from the first step to the end of the last epoch."""
    start_s = series.batch_sizes[0].time_s if series.batch_sizes else series.start_s
    end_s = series.epochs[-1].time_s if series.epochs else series.end_s
    samples = {node: round(sum(series.samples[rank])) for rank, node in enumerate(series.nodes)}
    energy = add_up_energy(read_power(run), series.nodes, samples, start_s, end_s)
    return energy if energy.machines else None
