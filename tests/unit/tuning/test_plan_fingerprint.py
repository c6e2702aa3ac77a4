"""The description of what has changed since a plan was made."""

from csdctl.tuning.plan import PlanFingerprint, list_changes

THEN = PlanFingerprint(
    job={"recipe.optimizer": "sgd", "recipe.optimizer_args.momentum": 0.9, "model_args.classes": 10},
    files={"models/model.py": "aa", "models/metric.py": "bb"},
    machines={"host": "x86_64 Xeon, 8 cores, 32 GiB", "csd1": "aarch64 Cortex-A53, 4 cores, 6 GiB"},
)


def changed(**changes: object) -> list[str]:
    return list_changes(THEN, THEN.model_copy(update=changes))


def test_nothing_has_changed() -> None:
    assert list_changes(THEN, THEN) == []


def test_changed_value_is_named_with_the_old_one() -> None:
    job = {**THEN.job, "recipe.optimizer": "adam", "model_args.classes": [10, 20]}
    assert changed(job=job) == [
        "recipe.optimizer: adam, was sgd when tuned",
        "model_args.classes: [10, 20], was 10 when tuned",
    ]


def test_added_or_removed_value_is_shown_as_not_set() -> None:
    job = {"recipe.optimizer": "sgd", "model_args.classes": 10, "recipe.from_logits": True}
    assert changed(job=job) == [
        "recipe.from_logits: true, was not set when tuned",
        "recipe.optimizer_args.momentum: not set, was 0.9 when tuned",
    ]


def test_file_with_other_content_is_named_without_its_directory() -> None:
    assert changed(files={"models/model.py": "cc", "models/metric.py": "bb"}) == ["model.py has changed"]


def test_added_or_removed_files_show_in_the_values_that_name_them() -> None:
    assert changed(files={"other.py": "aa"}) == []


def test_machine_is_described_by_the_difference() -> None:
    machines = {**THEN.machines, "csd1": "aarch64 Cortex-A53, 2 cores, 6 GiB"}
    assert changed(machines=machines) == ["csd1: 2 cores, was 4 cores"]


def test_machine_with_a_new_limit_is_described_in_full() -> None:
    machines = {"csd1": "aarch64 Cortex-A53, 4 cores, 2 CPU, 6 GiB"}
    assert changed(machines=machines) == [
        "csd1: aarch64 Cortex-A53, 4 cores, 2 CPU, 6 GiB, was aarch64 Cortex-A53, 4 cores, 6 GiB"
    ]


def test_machine_in_only_one_plan_is_no_change() -> None:
    assert changed(machines={"csd9": "aarch64, 1 core"}) == []
