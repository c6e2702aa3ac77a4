import resource
import subprocess
import sys

import pytest

from csdctl.worker.protocol.limits import LIMITS, explain_error, judge_limits, parse_process_limits

LIMITS_OF_A_BOARD = """\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max file size             8192                 4294967296           bytes     
Max data size             unlimited            unlimited            bytes     
Max stack size            8388608              unlimited            bytes     
Max resident set          unlimited            unlimited            bytes     
Max processes             500                  1000                 processes 
Max open files            64                   1048576              files     
Max address space         unlimited            3221225472           bytes     
Max realtime timeout      unlimited            unlimited            us        
"""  # noqa: W291 - as the kernel prints it


def test_hard_limits_count_and_of_processes_what_the_control_groups_still_allow() -> None:
    board = {"file size": 4 << 20, "processes": 1000, "open files": 1 << 20, "address space": 3 << 20}
    assert parse_process_limits(LIMITS_OF_A_BOARD) == board
    groups = "pids.max max\npids.current 9\npids.max 200\npids.current 180\npids.max 4915\npids.current 300\n"
    assert parse_process_limits(LIMITS_OF_A_BOARD + groups) == {**board, "processes": 20}
    assert parse_process_limits("pids.max 5\npids.current 9\n") == {"processes": 0}


@pytest.mark.parametrize(
    ("limits", "found", "expected", "must_fail"),
    [
        (dict.fromkeys(LIMITS, 1 << 50), "", "", False),
        ({"open files": 31}, "open files 31 (`ulimit -n`)", "32", True),
        ({"open files": 32, "file size": 8}, "file size 8 (`ulimit -f`)", "4096", True),
        ({"cpu time": 60}, "cpu time 60 (`ulimit -t`)", "86400", False),
        ({"cpu time": 60, "processes": 27}, "cpu time 60 (`ulimit -t`), processes 27", "86400, 28", True),
        ({"address space": 1000 << 10}, "address space 1024000 (`ulimit -v`)", "1499136", True),
    ],
)
def test_low_limits_are_those_with_which_a_small_model_does_not_train(
    limits: dict[str, int], found: str, expected: str, must_fail: bool
) -> None:
    judged = judge_limits(limits, num_cores=4)
    assert judged[0].startswith(found)
    assert judged[1:] == (expected, must_fail)


def test_each_node_takes_files_processes_and_memory_of_the_host() -> None:
    limits = {"open files": 48, "processes": 68, "address space": 1592 << 10}
    assert judge_limits(limits, 4, num_nodes=2) == ("", "", False)
    assert judge_limits(limits, 4, num_nodes=3)[1] == "56, 88, 1695744"


ERRORS = {
    "-n 9": "OSError: [Errno 24] Too many open files: 'x'",
    "-f 1": "OSError: [Errno 27] File too large",
    "-v 90000": "MemoryError",
    "-d 40000": "RuntimeError: can't start new thread",
}
"""Errors by the option of `ulimit` that causes them."""


@pytest.mark.parametrize("option", ERRORS)
def test_error_names_the_limit_that_it_is_due_to(option: str) -> None:
    program = (
        "import sys; from csdctl.worker.protocol import limits; print(limits.explain_error(sys.argv[1]))"
    )
    shell = f'ulimit {option} && exec "$@"'
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", program, ERRORS[option]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, value = option.split()
    assert "most likely" in done.stdout
    assert f"{value} (`ulimit {name}`)" in done.stdout
    assert done.stdout.count("ulimit") == 1


def test_error_is_not_due_to_a_limit_that_is_not_set() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    assert explain_error("MemoryError") == explain_error("ValueError: 7") == ""
