from csdctl.fleet.requirements import explain_extra


def test_extra_without_metadata_names_the_clone_alone() -> None:
    assert explain_extra("nothing") == "pip install '.[nothing]' in a clone of csdctl"
