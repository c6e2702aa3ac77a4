from csdctl.fleet.requirements import explain_extra


def test_extra_names_the_clone_and_its_packages_if_they_are_known() -> None:
    explained = explain_extra("metrics")
    assert explained.startswith("pip install '.[metrics]' in a clone of csdctl, or: ")
    assert "-m pip install 'prometheus-client>=" in explained
    assert "matplotlib" not in explained
    assert explain_extra("nothing") == "pip install '.[nothing]' in a clone of csdctl"
