"""A compromised node sends in the name of another node, or of the host, all that its link can send."""

from pathlib import Path

import pytest

from tests.attacks.sandboxed_links import sandboxed_links, write_hostile_python
from tests.patience import eventually

HOSTILE = 1
HONEST_SUMS = (["sum", "4.0", "0", "2"], ["sum", "6.0", "0", "1", "2"])
"""Of a step with and without the hostile node, whose own vector is honest."""

OTHER = 2
HEAD = f"""
import json, os, socket, struct, sys
if "link" in sys.orig_argv:
    worker = next(word for word in sys.orig_argv if word.endswith(".pyz"))
    sys.path.insert(0, os.path.abspath(worker))
    from csdctl.worker.group import link
    from csdctl.worker.group.channel import Letter, NUMBER
    OTHER, sequence = {OTHER}, [0]

    def frame(sender, tag, content):
        sequence[0] += 1
        head = struct.pack("=BBHI", 0x41, 1, 0, 14 + len(content))
        return head + struct.pack("=BBHiiH", 0x41, 0, 0, sender, tag, sequence[0]) + content

    def write_to_mpi(content):
        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{{name}}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                        found = max(found, int(name))
            except OSError:
                pass
        os.write(found, content)

    honest = link.RankEnd.handle_local
    def handle_local(end, letter, content):
        if letter == Letter.VECTOR:
"""
TAIL = """
        honest(end, letter, content)
    link.RankEnd.handle_local = handle_local
"""
CHUNK_OF_OTHERS = "struct.pack('=4096f', *[1e9] * 4096)"
FORGERIES = {
    "a frame in the name of another node": f"write_to_mpi(frame(OTHER, link.CHUNK, {CHUNK_OF_OTHERS}))",
    "a frame in the name of the host": f"write_to_mpi(frame(0, link.CHUNK, {CHUNK_OF_OTHERS}))",
    "another node's vector": "letter, content = Letter.VECTOR, json.dumps([OTHER]).encode()",
    "a vector of both nodes": "letter, content = Letter.VECTOR, json.dumps([1, OTHER]).encode()",
    "the sum": "end.pass_over(Letter.TOTAL, bytes(1))",
    "the loss of another node": "end.pass_over(Letter.NOTE, json.dumps([[OTHER, 'is lost', True]]).encode())",
    "another node that joins": "end.pass_over(Letter.JOIN, NUMBER.pack(OTHER))",
    "bytes of another node": "end.pass_over(Letter.DATA, NUMBER.pack(OTHER) + b'state')",
    "lines of mpirun": """for _ in range(10):
                print("Remote daemon: [prterun-host-1@0,2]", flush=True)
                print("Remote host: rank2-csd2", file=sys.stderr, flush=True)""",
}
"""Letters and frames in the name of others, and what mpirun prints when a daemon is lost."""


def build_forging_link(name: str) -> str:
    """Return a sitecustomize.py."""
    return f"{HEAD}            {FORGERIES[name]}\n{TAIL.strip(chr(10))}\n"


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
