"""The check `imports`: which machine lacks what a job's own code imports."""

from csdctl.fleet.checks import Check, Status
from csdctl.fleet.facts import Condition
from csdctl.job.imports import JobImports, Needed
from csdctl.workflows.preflight.doctor import judge_imports, needs_of

SCIPY, CV2 = Needed("scipy", "my_model.py"), Needed("cv2", "augment.py")


def judge(missing: tuple[str, ...] | None, *needed: Needed, perhaps: tuple[Needed, ...] = ()) -> Check:
    imports = JobImports(nodes=needed, perhaps=perhaps)
    return judge_imports(Condition("csd3", missing_modules=missing), imports, "/opt/python")


def test_missing_module_fails_with_the_file_that_imports_it() -> None:
    check = judge(("scipy",), SCIPY, CV2)
    assert (check.status, check.found) == (Status.FAIL, "has no scipy, which my_model.py imports")
    assert check.remedy == "install it there: `/opt/python -m pip install scipy`"


def test_module_that_nodes_may_not_need_is_a_warning() -> None:
    check = judge(("scipy",), CV2, perhaps=(SCIPY,))
    assert check.status == Status.WARN
    assert "csdctl prepare" in check.remedy


def test_found_modules_are_listed() -> None:
    assert judge((), SCIPY, perhaps=(CV2,)).found == "scipy, cv2"
    assert judge(None).status == Status.OK
    assert judge(None, SCIPY).status == Status.WARN


def test_host_and_nodes_need_different_modules() -> None:
    imports = JobImports(host=(SCIPY,), nodes=(CV2,), perhaps=(SCIPY,))
    assert needs_of("host", imports) == ((SCIPY,), ())
    assert needs_of("csd0", imports) == ((CV2,), (SCIPY,))
    assert needs_of("csd0", None) == ((), ())
