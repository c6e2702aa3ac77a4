"""Host keys as people compare them, and as programs read them."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from csdctl.cli.render.problems import render_failed
from csdctl.cli.streams import Streams
from csdctl.errors import CsdctlError
from csdctl.fleet.model import Fleet
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.discovery.discover import find_shared_host_keys
from csdctl.workflows.discovery.trust import KeyState, ShownKey
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.trust/1"


class TrustScreen:
    """Shows the keys of one layer of machines after the other, and remembers them."""

    def __init__(self, streams: Streams, fleet: Fleet) -> None:
        self._streams = streams
        self._fleet = fleet
        self._keys: dict[str, ShownKey] = {}
        self.failed: dict[str, CsdctlError] = {}

    @property
    def machines(self) -> list[str]:
        """All machines asked so far."""
        return [*self._keys, *self.failed]

    def show_keys(self, outcomes: Mapping[str, Outcome[ShownKey]]) -> list[ShownKey]:
        """A table of the keys that are new, and what went wrong; returns the new ones."""
        shown = {name: outcome.value for name, outcome in outcomes.items() if outcome.value}
        failed = errors_of(outcomes)
        self._keys |= shown
        self.failed |= failed
        new = [key for key in shown.values() if key.state is KeyState.NEW]
        if new:
            self._streams.people.print(_build_table(new))
        if num_known := len(shown) - len(new):
            self._streams.say(f"{num_known} keys are known already")
        for warning in find_shared_host_keys({name: key.fingerprint for name, key in shown.items()}):
            self._streams.say(f"warning: {warning}")
        render_failed(self._streams.people, failed, self._fleet)
        return new

    def show_forgotten(self, removed: Mapping[str, int]) -> None:
        """How many keys of each machine were forgotten."""
        for name, number in removed.items():
            self._streams.say(f"{name}: {number} keys forgotten" if number else f"{name}: no key was known")
        self._streams.result({"schema": SCHEMA, "forgotten": dict(removed)})

    def document(self) -> dict[str, object]:
        """The `csdctl.trust/1` document."""
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
        return {"schema": SCHEMA, "machines": keys, "failed": failed_document(self.failed)}


def _build_table(keys: list[ShownKey]) -> Table:
    table = Table(title="new host keys", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("machine", "address", "type"):
        table.add_column(column, no_wrap=True)
    table.add_column("fingerprint", overflow="fold")
    for key in keys:
        table.add_row(key.node.name, f"{key.node.address} port {key.node.port}", key.type, key.fingerprint)
    return table
