"""Deploying trees: what is packed, and the results of nodes that fail."""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from csdctl.errors import UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.shipping.payload import FileTree, TreeRequest
from csdctl.transport.many import Outcome
from csdctl.workflows.data.deployment import DeployRequest, deploy_request


@dataclass
class Observer:
    """Records the trees that were packed and the nodes that finished."""

    trees: list[FileTree] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def packed(self, request: TreeRequest, tree: FileTree) -> None:
        self.trees.append(tree)

    def advance(self, progress: DeliveryProgress) -> None:
        raise AssertionError("nothing can be sent")

    def finish(self, outcome: Outcome[Delivery]) -> None:
        self.finished.append(outcome.name)


@pytest.fixture
def fleet() -> Fleet:
    """A node behind a closed port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Fleet((Node("csd0", "127.0.0.1", port=port),))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    source = tmp_path / "tree"
    (source / ".git").mkdir(parents=True)
    (source / ".git" / "config").write_text("x")
    (source / "code.py").write_text("x")
    (source / "notes.txt").write_text("x")
    return source


def deploy(fleet: Fleet, request: DeployRequest) -> tuple[dict[str, Outcome[Delivery]], Observer]:
    observer = Observer()
    directory = Path(request.trees[0]).parent
    say = list[str]().append
    return deploy_request(request, fleet, directory=directory, say=say, observer=observer), observer


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"code.py", "notes.txt"}),
        ({"ignored": ["*.txt"]}, {"code.py"}),
        ({"is_everything": True}, {"code.py", "notes.txt", ".git/config"}),
    ],
)
def test_files_of_a_tree_and_the_node_that_fails(
    fleet: Fleet, tree: Path, options: dict[str, Any], names: set[str]
) -> None:
    outcomes, observer = deploy(fleet, DeployRequest(Path("job.yaml"), [str(tree)], **options))
    assert {name for name, _ in observer.trees[0].files} == names
    assert isinstance(outcomes["csd0"].error, UnreachableError)
    assert observer.finished == ["csd0"]
