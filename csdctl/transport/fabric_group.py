"""The nodes of a fleet as a Fabric group, over the threads, connections and deadlines of csdctl."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import fabric
from fabric.exceptions import GroupException
from fabric.group import GroupResult

from csdctl.errors import InputError
from csdctl.fleet.model import Fleet
from csdctl.transport.fabric_connection import FleetConnection, FleetLink, build_config
from csdctl.transport.many import MAX_WORKERS, allow_open_files, fleet_known_hosts_paths, run_on_all


class FleetGroup(fabric.ThreadingGroup):  # type: ignore[misc]
    """A Fabric group of the nodes of a fleet, in its order; use it as a context manager.

    A node that fails does not stop the others: the GroupException has the results of all.
    """

    link: FleetLink | None = None

    def each(self, function: Callable[[FleetConnection], Any]) -> GroupResult:
        """Call `function` for each connection in parallel; the result has values and exceptions."""

        def attempt(connection: FleetConnection) -> Any:
            try:
                return function(connection)
            except (Exception, SystemExit) as error:
                return error

        by_number = {str(number): connection for number, connection in enumerate(self)}
        try:
            outcomes = run_on_all(by_number, attempt, max_workers=MAX_WORKERS)
        except BaseException:
            self.close()
            raise
        return GroupResult({by_number[number]: outcome.get() for number, outcome in outcomes.items()})

    def close(self) -> None:
        """End what runs on the nodes, and close all connections."""
        connections = {str(number): connection for number, connection in enumerate(self)}
        run_on_all(connections, lambda connection: connection.close(), max_workers=MAX_WORKERS)
        if self.link:
            self.link.close()

    def _do(self, method: str, *args: Any, **kwargs: Any) -> GroupResult:
        results = self.each(lambda connection: getattr(connection, method)(*args, **kwargs))
        if any(isinstance(result, BaseException) for result in results.values()):
            raise GroupException(results)
        return results


def open_group(
    fleet: Fleet,
    *,
    directory: Path,
    connect_deadline_s: float,
    command_deadline_s: float | None,
    folder: Path | None = None,
    printed: Mapping[str, Mapping[str, TextIO]] | None = None,
) -> FleetGroup:
    """Return a group of the nodes of `fleet`; each connects when it is first used.

    `folder` is that of the user's Fabric configuration, `printed` has the streams of each node's connection.
    Raises InputError when the system allows too few open files.
    """
    if allow_open_files(len(fleet.nodes)) < len(fleet.nodes):
        raise InputError(
            f"{len(fleet.nodes)} connections are needed, and the system allows fewer open files",
            remedy="use fewer nodes at a time with --limit, or run `ulimit -n 4096` first",
        )
    link = FleetLink(
        fleet_known_hosts_paths(fleet, directory),
        connect_deadline_s=connect_deadline_s,
        command_deadline_s=command_deadline_s,
    )
    group = FleetGroup.from_connections(
        FleetConnection(node, link, build_config(link, folder), (printed or {}).get(node.name, {}))
        for node in fleet.nodes
    )
    group.link = link
    return group  # type: ignore[no-any-return]
