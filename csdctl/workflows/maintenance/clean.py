"""`clean`: end processes and remove files that earlier csdctl commands left on the nodes and the host.

On the host only unfinished files are removed, and features and predictions on request: plans, runs and models
stay, whatever the options.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.leftovers import CleanupOptions, Leftovers, clean_machine
from csdctl.runs.ledger import record_traffic
from csdctl.transport.local import LocalSession
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes
from csdctl.transport.session import Session

OnCleaned = Callable[[Outcome[Leftovers]], None]


def clean(
    fleet: Fleet,
    options: CleanupOptions,
    *,
    directory: Path,
    on_done: OnCleaned = lambda outcome: None,
) -> dict[str, Outcome[Leftovers]]:
    """Clean the host and all nodes of `fleet`; failures are in the result, not raised."""

    def clean_node(session: Session) -> Leftovers:
        return clean_machine(session, fleet.node(session.name).python, options)

    with contextlib.closing(LocalSession(HOST_NAME, directory)) as host:
        on_host = replace(options, is_removing_all=False, is_pruning=False)
        outcomes = run_on_all(
            {HOST_NAME: host},
            lambda session: clean_machine(session, sys.executable, on_host),
            on_done=on_done,
        )
    on_traffic = record_traffic(directory, "clean")
    return outcomes | run_on_nodes(
        fleet, clean_node, directory=directory, on_done=on_done, on_traffic=on_traffic
    )
