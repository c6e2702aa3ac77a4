"""Host keys, as a table and as JSON."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from csdctl.cli.render.problems import render_failed
from csdctl.cli.streams import Streams
from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet
from csdctl.fleet.names import format_node_names
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.discovery.discover import find_shared_host_keys
from csdctl.workflows.discovery.trust import ShownKey
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.trust/1"


class TrustScreen:
    """Shows the keys of each layer of machines in turn, asks for confirmation, and collects them all."""

    def __init__(
        self, streams: Streams, fleet: Fleet, *, yes: bool = False, is_dry_run: bool = False
    ) -> None:
        self._streams = streams
        self._fleet = fleet
        self._yes = yes
        self._is_dry_run = is_dry_run
        self._keys: dict[str, ShownKey] = {}
        self.failed: dict[str, CsdctlError] = {}

    @property
    def machines(self) -> list[str]:
        """All machines visited so far."""
        return [*self._keys, *self.failed]

    def show(self, outcomes: Mapping[str, Outcome[ShownKey]], new: Sequence[ShownKey]) -> None:
        """Print a table of the keys that are new, and the machines that failed."""
        shown = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
        failed = errors_of(outcomes)
        self._keys |= shown
        self.failed |= failed
        if new:
            self._streams.console.print(_build_table(new))
        if num_known := len(shown) - len(new):
            self._streams.say(f"{num_known} keys are already accepted")
        for warning in find_shared_host_keys({name: key.fingerprint for name, key in shown.items()}):
            self._streams.say(f"warning: {warning}")
        render_failed(self._streams.console, failed, self._fleet)

    def confirm(self, new: Sequence[ShownKey]) -> None:
        """Ask for confirmation; raises InputError unless the answer is yes."""
        self._streams.confirm(f"Accept {len(new)} new keys?", yes=self._yes)

    def accepted(self, new: Sequence[ShownKey]) -> None:
        """Print where the new keys are stored."""
        path = ProjectDirectory(self._streams.directory).known_hosts
        self._streams.say(f"{len(new)} keys accepted: {path}")

    def not_asked(self, machines: Sequence[str]) -> None:
        """Print which machines a dry run cannot ask."""
        self._streams.say(
            f"{format_node_names(machines)}: not asked, as the key of the jump host is not accepted yet"
        )

    def show_forgotten(self, removed: Mapping[str, int]) -> None:
        """Print how many keys of each machine were deleted."""
        done = "would be deleted" if self._is_dry_run else "deleted"
        for name, number in removed.items():
            self._streams.say(f"{name}: {number} keys {done}" if number else f"{name}: no key was stored")
        self._streams.result({"schema": SCHEMA, "is_dry_run": self._is_dry_run, "forgotten": dict(removed)})

    def document(self) -> dict[str, object]:
        """Return the `csdctl.trust/1` document."""
        keys = {
            name: {
                "address": key.node.address,
                "port": key.node.port,
                "type": key.type,
                "fingerprint": key.fingerprint,
                "state": key.state.value,
            }
            for name, key in self._keys.items()
        }
        return {
            "schema": SCHEMA,
            "is_dry_run": self._is_dry_run,
            "machines": keys,
            "failed": failed_document(self.failed),
        }


def _build_table(keys: Sequence[ShownKey]) -> Table:
    table = Table(title="new host keys", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("machine", "address", "type"):
        table.add_column(column, no_wrap=True)
    table.add_column("fingerprint", overflow="fold")
    for key in keys:
        table.add_row(key.node.name, f"{key.node.address} port {key.node.port}", key.type, key.fingerprint)
    return table
