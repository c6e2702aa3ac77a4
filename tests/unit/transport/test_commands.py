import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.errors import InputError
from csdctl.transport.commands import MarkedOutput, build_kill_command, build_wrapped_command

SHELLS = [[shell] for shell in ("dash", "bash", "zsh", "ksh", "mksh") if shutil.which(shell)]
SHELLS += [["busybox", "sh"]] if shutil.which("busybox") else []


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize(("is_users", "limits"), [(True, "20 8"), (False, "99 unlimited")])
def test_wrapper_works_in_every_posix_shell_and_raises_the_soft_limits_of_csdctls_programs(
    shell: list[str], is_leader: bool, is_users: bool, limits: str
) -> None:
    lowered = ["bash", "-c", 'ulimit -Sn 20; ulimit -Hn 99; ulimit -Sf 8; exec "$@"', "bash", *shell]
    program = ["bash", "-c", 'echo "$1" $(ulimit -n) $(ulimit -f); cat; echo e >&2; exit 7', "x", "a b"]
    wrapped = build_wrapped_command(program, deadline_s=50, is_users=is_users)
    done = subprocess.run(
        [*lowered, *wrapped.argv[1:]],
        input=wrapped.script + b"input",
        capture_output=True,
        start_new_session=is_leader,
        check=False,
    )
    stdout, stderr = (MarkedOutput(wrapped.token, max_bytes=100) for _ in range(2))
    stdout.feed(done.stdout)
    stderr.feed(done.stderr)
    assert (done.returncode, stdout.kept, stderr.kept) == (7, f"a b {limits}\ninput".encode(), b"e\n")
    assert stderr.group > 1


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 7), st.binary(max_size=30))
def test_output_is_found_in_chunks_of_any_size(chunks: list[bytes], cut: int, preamble: bytes) -> None:
    content = b"".join(chunks)
    stream = preamble + b"csdctl-0 123\n" + content
    output = MarkedOutput("csdctl-0", max_bytes=10_000)
    fed = b"".join(output.feed(stream[start : start + cut]) for start in range(0, len(stream), cut))
    assert (fed, output.kept, output.group, bytes(output.preamble)) == (content, content, 123, preamble)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 30), st.booleans())
def test_kept_output_is_the_beginning_or_the_end(chunks: list[bytes], max_bytes: int, keep_end: bool) -> None:
    output = MarkedOutput("t", max_bytes=max_bytes, keep_end=keep_end)
    output.feed(b"t\n")
    for chunk in chunks:
        output.feed(chunk)
    content = b"".join(chunks)
    assert output.kept == (content[-max_bytes:] if keep_end else content[:max_bytes])


def test_endless_preamble_stays_bounded() -> None:
    output = MarkedOutput("token", max_bytes=10)
    for _ in range(100):
        output.feed(b"x" * 10_000)
    assert len(output.preamble) <= MarkedOutput.MAX_PREAMBLE_BYTES
    assert output.feed(b"token\nrest") == b"rest"


@pytest.mark.parametrize("said", ["1", "-7", "0x10", "7 8", "9" * 11, "9" * 5000])
def test_impossible_process_groups_are_not_believed(said: str) -> None:
    output = MarkedOutput("token", max_bytes=10)
    assert output.feed(f"token {said}\nx".encode()) == b""
    assert (output.has_started, output.group) == (False, 0)
    assert output.feed(b"token 77\nrest") == b"rest"
    assert output.group == 77


@pytest.mark.parametrize("group", [-1, 0, 1])
def test_only_own_process_groups_can_be_ended(group: int) -> None:
    with pytest.raises(ValueError, match="not a process group"):
        build_kill_command(group)


def test_one_argument_longer_than_linux_takes_is_refused() -> None:
    with pytest.raises(InputError, match="longer than"):
        build_wrapped_command(["echo", "x" * 130_000], deadline_s=1)
