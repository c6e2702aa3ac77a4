import pytest

from csdctl.fleet.requirements import explain_extra, find_package


def test_extra_names_the_clone_and_its_packages_if_they_are_known() -> None:
    explained = explain_extra("metrics")
    assert explained.startswith("pip install '.[metrics]' in a clone of csdctl, or: ")
    assert "-m pip install 'prometheus-client>=" in explained
    assert "matplotlib" not in explained
    assert explain_extra("nothing") == "pip install '.[nothing]' in a clone of csdctl"


KERAS_FRAMES = 'File "/venv/lib/python3.12/site-packages/keras/__init__.py", line 2, in <module>\n'


@pytest.mark.parametrize(
    ("trace", "package"),
    [
        (f"{KERAS_FRAMES}ModuleNotFoundError: No module named 'tensorflow'\n", "tensorflow"),
        (f"{KERAS_FRAMES}ModuleNotFoundError: No module named 'h5py'\n", "keras"),
        ("ModuleNotFoundError: No module named 'mine'\n", None),
    ],
)
def test_package_that_could_not_be_loaded_is_the_innermost(trace: str, package: str | None) -> None:
    assert find_package(trace) == package
