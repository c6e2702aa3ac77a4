"""`trust`: fetch the host keys of a fleet, let the user review the new ones, and accept them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from csdctl.fleet.model import Fleet
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.many import Outcome
from csdctl.workflows.discovery.trust import KeyState, ShownKey, accept_keys, fetch_keys, list_layers


class KeyReviewer(Protocol):
    """Lets the user decide which host keys are accepted."""

    def show(self, outcomes: Mapping[str, Outcome[ShownKey]], new: Sequence[ShownKey]) -> None:
        """Show the keys of one layer of machines, and which of them are new."""

    def confirm(self, new: Sequence[ShownKey]) -> None:
        """Raise InputError unless the new keys may be accepted."""

    def accepted(self, new: Sequence[ShownKey]) -> None:
        """Report that the new keys were accepted."""

    def not_asked(self, machines: Sequence[str]) -> None:
        """Report machines that only a machine with a new key leads to."""


def review_keys(
    fleet: Fleet, project: ProjectDirectory, reviewer: KeyReviewer, *, is_dry_run: bool = False
) -> None:
    """Let `reviewer` accept the new host keys of `fleet`, layer by layer.

    A machine behind a jump host is reached only after the key of the jump host is accepted, so jump hosts
    come first. Machines that fail are shown, not raised. A dry run accepts none, so it asks no machine behind
    one with a new key.
    """
    closed: set[str] = set()
    for layer in list_layers(fleet):
        machines = {
            name: node for name, node in layer.items() if not (node.jump and node.jump.name in closed)
        }
        if left_out := [name for name in layer if name not in machines]:
            closed |= {*left_out}
            reviewer.not_asked(left_out)
        outcomes = fetch_keys(fleet, machines, directory=project.root)
        shown = [outcome.value for outcome in outcomes.values() if outcome.value]
        new = [key for key in shown if key.state is KeyState.NEW]
        reviewer.show(outcomes, new)
        if is_dry_run:
            closed |= {key.node.name for key in new}
        elif new:
            reviewer.confirm(new)
            accept_keys(new, project)
            reviewer.accepted(new)
