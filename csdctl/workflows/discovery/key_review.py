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


def review_keys(fleet: Fleet, project: ProjectDirectory, reviewer: KeyReviewer) -> None:
    """Let `reviewer` accept the new host keys of `fleet`, layer by layer.

    A machine behind a jump host is reached only after the key of the jump host is accepted, so jump hosts
    come first. Machines that fail are shown, not raised.
    """
    for machines in list_layers(fleet):
        outcomes = fetch_keys(fleet, machines, directory=project.root)
        shown = [outcome.value for outcome in outcomes.values() if outcome.value]
        new = [key for key in shown if key.state is KeyState.NEW]
        reviewer.show(outcomes, new)
        if new:
            reviewer.confirm(new)
            accept_keys(new, project)
            reviewer.accepted(new)
