"""What `clean` leaves on the host, whatever its options are."""

from pathlib import Path

from csdctl.fleet.model import Fleet
from csdctl.launch.leftovers import CleanupOptions, clean

KEPT = ["plans/job.yaml", "runs/1/manifest.json", "known_hosts", "models/m/info.json", "objects/0123.npy"]


def test_plans_runs_models_and_keys_of_the_host_stay(tmp_path: Path) -> None:
    for name in (*KEPT, "objects/4567.npy.part", "features/a/images.npy"):
        path = tmp_path / ".csdctl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    options = CleanupOptions(
        is_removing=True, is_removing_all=True, is_removing_computed=True, is_pruning=True
    )
    outcomes = clean(Fleet(()), options, directory=tmp_path)
    assert outcomes["host"].value
    assert {*outcomes["host"].value.paths} == {".csdctl/objects/4567.npy.part", ".csdctl/features"}
    left = {str(path.relative_to(tmp_path / ".csdctl")) for path in tmp_path.rglob("*") if path.is_file()}
    assert {*KEPT} <= left
    assert not {name for name in left if name.startswith("features") or name.endswith(".part")}
