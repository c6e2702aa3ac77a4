"""What tasks print."""

from csdctl.workflows.exec.run_task import Printed


def test_bytes_that_were_no_text_are_kept() -> None:
    printed = Printed()
    printed.write(b"caf\xe9".decode(errors="surrogateescape"))
    assert printed.data == b"caf\xe9"


def test_half_of_a_surrogate_pair_is_escaped() -> None:
    printed = Printed()
    printed.write("name: \ud83d")
    assert printed.data == b"name: \\ud83d"
