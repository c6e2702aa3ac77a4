"""Traffic from what the two ends of each connection have counted."""

from collections.abc import Sequence
from typing import Any

import pytest

from csdctl.worker.group.messages import Counters, gather_traffic
from csdctl.worker.protocol.json_codec import ProtocolError, read_as

HOST, NODE, OTHER = "10.0.0.1 1", "10.0.0.2 2", "10.0.0.3 3"


def traffic(*ranks: Any) -> dict[tuple[str, int, int], int]:
    """What `gather_traffic` makes of what the ranks say: [messages, connections] each."""

    def gather(_: Any, hint: Any) -> Sequence[Counters]:
        return [read_as(hint, rank) for rank in ranks]

    return {(row.what, row.sender, row.receiver): row.num_bytes for row in gather_traffic(gather, [], ())}


def test_bytes_of_messages_are_told_apart_from_those_of_sums() -> None:
    host = [[["state", 0, 1, 300]], [[HOST, NODE, 1000, 500]]]
    node = [[], [[NODE, HOST, 500, 1000]]]
    assert traffic(host, node) == {("state", 0, 1): 300, ("sums", 0, 1): 700, ("sums", 1, 0): 500}


def test_node_cannot_claim_bytes_that_the_other_end_has_not_seen() -> None:
    host = [[], [[HOST, NODE, 1000, 500]]]
    assert traffic(host, [[], [[NODE, HOST, 1 << 49, 0]]]) == {("sums", 1, 0): 500}
    assert traffic(host, [[], [[NODE, HOST, 500, 1 << 49]]]) == {("sums", 0, 1): 1000, ("sums", 1, 0): 500}
    assert traffic(host, [[], [[NODE, OTHER, 1 << 49, 1 << 49]]]) == {}


def test_node_can_take_neither_another_ones_connections_nor_messages() -> None:
    host = [[], [[HOST, NODE, 1000, 500]]]
    node = [[["state", 1, 0, 1 << 49]], [[NODE, HOST, 500, 1000]]]
    thief = [[], [[HOST, NODE, 7, 7], [NODE, HOST, 7, 7]]]
    assert traffic(host, node) == {("sums", 0, 1): 1000, ("sums", 1, 0): 500}
    assert traffic(host, node, thief)["sums", 0, 1] == 1000


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[]],
        [[["sums", 0, 1, 5]], []],
        [[["state", 0, -1, 5]], []],
        [[], [[HOST, NODE, 1]]],
        [[], [[HOST, NODE, 1, 1 << 60]]],
        [[], [["x" * 81, NODE, 1, 1]]],
    ],
)
def test_counters_of_another_form_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        read_as(Counters, value)
