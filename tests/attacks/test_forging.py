"""A compromised node sends in the name of another node, or of the host, all that its link can send."""

from pathlib import Path

import pytest

from tests.attacks.forging_link import FORGERIES, OTHER, build_forging_link
from tests.attacks.sandboxed_links import sandboxed_links, write_hostile_python
from tests.patience import eventually

HOSTILE = 1
HONEST_SUMS = (["sum", "4.0", "0", "2"], ["sum", "6.0", "0", "1", "2"])
"""Of a step with and without the hostile node, whose own vector is honest."""


@pytest.mark.attack(21)
@pytest.mark.parametrize("name", FORGERIES)
def test_node_speaks_for_itself_alone(tmp_path: Path, name: str) -> None:
    python = write_hostile_python(tmp_path / "hostile", build_forging_link(name))
    with sandboxed_links({HOSTILE: python}) as links:
        lost = []
        for _ in range(5):
            summed = links.step(HOSTILE)
            assert summed in HONEST_SUMS, links.printed()
            while (words := links.read(0))[0] == "lost":
                lost.append(words)
            assert words == ["over"]
        assert all(words[1] == str(HOSTILE) for words in lost), lost
        assert not links.links[OTHER].has_ended
        if name == "lines of mpirun":
            assert lost == []
            # mpirun forwards lines while the ranks go on.
            assert eventually(lambda: "prterun-host-1" in links.printed()), "the attack was not made"
        elif name != "a frame in the name of the host":
            assert lost, "the attack was not noticed"
