"""Sources of nodes: address ranges, an Ansible inventory, ssh_config; and the fleet.yaml for them."""

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from csdctl.documents import save_text
from csdctl.errors import InputError
from csdctl.fleet.ansible.config import load_config
from csdctl.fleet.ansible.files import load_inventory
from csdctl.fleet.ansible.targets import list_targets
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.fleet.names import NAME
from csdctl.fleet.openssh import Target
from csdctl.fleet.select import select_names, select_nodes
from csdctl.fleet.ssh_aliases import list_aliases
from csdctl.fleet.writing import render_fleet
from csdctl.workflows.discovery.scan import scan
from csdctl.workflows.discovery.ssh_targets import resolve_targets


@dataclass(frozen=True)
class FoundFleet:
    """A fleet from a source, the text of its file, and where csdctl deviates from the source."""

    fleet: Fleet
    text: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundNodes:
    """Nodes of a source, and where csdctl deviates from the source."""

    nodes: tuple[Node, ...]
    warnings: tuple[str, ...] = ()
    network: str = ""


class NodeSource(Protocol):
    """A source of nodes."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def origin(self) -> str:
        """The first line of the fleet file created from it."""

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Return the nodes selected by `limit` and `exclude`; raises InputError or NoNodeReachableError."""


@dataclass(frozen=True)
class AddressRanges:
    """Machines with an SSH server in some address ranges."""

    cidrs: tuple[str, ...]
    user: str = "root"
    key: Path | None = None
    port: int = 22
    interface: str = ""

    @property
    def name(self) -> str:
        """The ranges."""
        return ", ".join(self.cidrs)

    @property
    def origin(self) -> str:
        """How they were found."""
        return "Found by `csdctl discover" + "".join(f" --cidr {cidr}" for cidr in self.cidrs) + "`"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Scan all addresses; a single range also becomes the network of the fleet."""
        nodes = scan(self.cidrs, user=self.user, key=self.key, port=self.port, interface=self.interface)
        chosen = select_nodes(Fleet(nodes, path=Path(self.name)), limit, exclude).nodes
        return FoundNodes(chosen, network=self.cidrs[0] if len(self.cidrs) == 1 else "")


@dataclass(frozen=True)
class _FileSource:
    """A source that is one file."""

    path: Path
    option: ClassVar[str]
    """The option of `csdctl discover` that gives the file."""

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def origin(self) -> str:
        """How it was read."""
        return f"Written by `csdctl discover {self.option} {self.path}`"


@dataclass(frozen=True)
class AnsibleInventory(_FileSource):
    """The hosts of an Ansible inventory."""

    option: ClassVar[str] = "--inventory"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Return its hosts, as Ansible and ssh would reach them."""
        inventory = load_inventory(self.path)
        inventory.defaults = load_config(directory)
        targets, warnings = list_targets(inventory, str(self.path), limit, exclude)
        return FoundNodes(*resolve_targets(targets, warnings, directory=directory))


@dataclass(frozen=True)
class SshConfig(_FileSource):
    """The aliases of an ssh_config."""

    option: ClassVar[str] = "--ssh-config"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Return its aliases, as ssh would reach them."""
        aliases = list_aliases(self.path)
        chosen = select_names(dict.fromkeys(aliases, ()), limit, exclude, where=str(self.path))
        usable = [
            alias for alias in chosen if NAME.fullmatch(alias) and alias not in (HOST_NAME, "localhost")
        ]
        if not usable:
            raise InputError(f"{self.path}: {', '.join(chosen)} is not a valid node name")
        skipped = [alias for alias in chosen if alias not in usable]
        # With -F, ssh ignores the system's configuration, which otherwise applies besides the user's.
        arguments = () if self.path.resolve() == _user_config() else ("-F", str(self.path.absolute()))
        targets = [Target(alias, alias, arguments) for alias in usable]
        warnings = {"not a valid node name: skipped": skipped} if skipped else {}
        return FoundNodes(*resolve_targets(targets, warnings, directory=directory))


def _user_config() -> Path:
    """Return the file that ssh reads without -F; ssh uses the user database, not $HOME."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh", "config").resolve()


def find_nodes(
    source: NodeSource, path: Path, *, directory: Path, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> FoundFleet:
    """Return the fleet for file `path`, not yet written; raises InputError or NoNodeReachableError."""
    found = source.find(directory, limit, exclude)
    fleet = Fleet(found.nodes, network=found.network, path=path)
    return FoundFleet(fleet, render_fleet(fleet, origin=source.origin), found.warnings)


def write_fleet(found: FoundFleet, *, force: bool = False) -> None:
    """Write fleet.yaml; raises InputError when it exists, unless `force`."""
    check_may_write(found.fleet.path, force=force)
    save_text(found.fleet.path, found.text)


def check_may_write(path: Path, *, force: bool) -> None:
    """Raise InputError when writing `path` would overwrite something."""
    if path.exists() and not force:
        raise InputError(
            f"{path} already exists", remedy="give another file with --fleet, or overwrite it with --force"
        )
