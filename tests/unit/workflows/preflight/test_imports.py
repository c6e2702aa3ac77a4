"""The check `imports`: which machine lacks what a job's own code imports."""

from csdctl.fleet.checks import Status
from csdctl.job.imports import JobImports, Needed
from csdctl.workflows.preflight.doctor import judge_imports, needs_of

SCIPY, CV2 = Needed("scipy", "my_model.py"), Needed("cv2", "augment.py")


def test_missing_module_fails_with_the_file_that_imports_it() -> None:
    check = judge_imports("csd3", ["scipy"], [SCIPY, CV2], [], "/opt/python")
    assert (check.status, check.found) == (Status.FAIL, "has no scipy, which my_model.py imports")
    assert check.remedy == "install it there: `/opt/python -m pip install scipy`"


def test_module_that_nodes_may_not_need_is_a_warning() -> None:
    check = judge_imports("csd3", ["scipy"], [CV2], [SCIPY], "python3")
    assert check.status == Status.WARN
    assert "csdctl prepare" in check.remedy


def test_host_and_nodes_need_different_modules() -> None:
    imports = JobImports(host=(SCIPY,), nodes=(CV2,), perhaps=(SCIPY,))
    assert needs_of("host", imports) == ((SCIPY,), ())
    assert needs_of("csd0", imports) == ((CV2,), (SCIPY,))
    assert needs_of("csd0", None) == ((), ())
