"""The addresses of the host, and whether one of them is in MPI's network."""

import pytest

from csdctl.errors import InputError
from csdctl.fleet.network import parse_local_addresses
from csdctl.launch.mpi_command import check_addresses, check_network

# From /proc/net/fib_trie of a machine with two addresses on one interface.
FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 4
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.1.0/24 2 0 2
        |-- 10.1.1.0
           /24 link UNICAST
Local:
  +-- 0.0.0.0/0 2 0 2
     +-- 10.1.1.0/24 2 0 2
        |-- 10.1.1.1
           /32 host LOCAL
        |-- 10.1.1.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.0
           /8 host LOCAL
        |-- 127.0.0.1
           /32 host LOCAL
        |-- 192.168.7.9
           /32 host LOCAL
"""


def test_exactly_the_addresses_of_the_host_are_found() -> None:
    assert parse_local_addresses(FIB_TRIE) == ["10.1.1.1", "127.0.0.1", "192.168.7.9"]


def test_loopback_network_is_accepted() -> None:
    check_network("127.0.0.0/8")
    check_network("")


def test_network_without_an_address_of_this_host_is_rejected_with_its_addresses() -> None:
    with pytest.raises(InputError, match=r"203\.0\.113\.0/24: this host has no address in it.*127\.0\.0\.1"):
        check_network("203.0.113.0/24")


def test_host_with_nothing_but_a_loopback_is_rejected_with_a_command_that_helps() -> None:
    with pytest.raises(InputError, match="daemons need an interface besides the loopback") as caught:
        check_addresses("127.0.0.0/8", ["127.0.0.1"])
    assert "ip link add" in caught.value.remedy
    check_addresses("127.0.0.0/8", ["127.0.0.1", "192.0.2.1"])
