"""The common start and end of commands that contact a whole fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet
from csdctl.runs.directory import ProjectDirectory
from csdctl.terminal.streams import Streams
from csdctl.terminal.tables import render_failed
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.workspace.partial_failure import choose_fleet, conclude


def outcomes_document(
    schema: str, outcomes: Mapping[str, Outcome[Any]], *, is_dry: bool
) -> dict[str, object]:
    """Return the JSON document of a command that ran on machines: their results by name, and what failed."""
    return {
        "schema": schema,
        "is_dry_run": is_dry,
        "machines": {name: outcome.value for name, outcome in outcomes.items() if outcome.value is not None},
        "failed": errors_of(outcomes),
    }


@dataclass(frozen=True)
class Invocation:
    """One call of a command: its name, its streams, and the nodes that its options select."""

    command: str
    streams: Streams
    fleet: Fleet

    @classmethod
    def start(
        cls,
        command: str,
        path: Path,
        limit: Sequence[str] | None,
        exclude: Sequence[str] | None,
        failed_from: Path | None,
        *,
        json: bool,
    ) -> Self:
        """Read the fleet file `path` and select nodes; raises InputError."""
        return cls(command, Streams(is_json=json), choose_fleet(path, limit, exclude, failed_from))

    @property
    def project(self) -> ProjectDirectory:
        """The project directory that the command was called in."""
        return ProjectDirectory(self.streams.directory)

    def finish(self, document: object, outcomes: Mapping[str, Outcome[Any]], *, is_dry: bool = False) -> None:
        """Report the machines that failed, then `conclude`."""
        failed = errors_of(outcomes)
        render_failed(self.streams.console, failed, self.fleet)
        self.conclude(document, list(outcomes), failed, is_dry=is_dry)

    def conclude(
        self,
        document: object,
        machines: Sequence[str],
        failed: Mapping[str, CsdctlError],
        arguments: str = "",
        *,
        is_dry: bool = False,
    ) -> None:
        """Print the JSON document, record which of `machines` failed, and raise one error for them.

        A dry run on which no machine failed leaves what an earlier command has recorded.
        """
        self.streams.result(document)
        if is_dry and not failed:
            return
        conclude(self.project, self.command, machines, failed, arguments)
