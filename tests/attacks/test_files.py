"""Other users of the machine: links in shared directories, files that they read, programs that they swap."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

import csdctl
from csdctl.errors import CsdctlError, InputError
from csdctl.facts.machine import CONDITION_FACTS, ClockTrip, build_command, parse_facts
from csdctl.fleet.facts import Condition
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.leftovers import lock_machines
from csdctl.shipping.deliver import Delivery, deliver, pack_payload
from csdctl.shipping.store import OBJECTS, StoredFile, pack_worker, store_bytes
from csdctl.transport.commands import build_worker_command
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from tests.attacks.other_user import give, mode_of, needs_root
from tests.emulated.running import CSDCTL, refuse

pytestmark = pytest.mark.first(1)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def stored(tmp_path: Path) -> StoredFile:
    return store_bytes(b"content", ".bin", tmp_path / "of-host")


def send(home: Path, stored: StoredFile) -> Delivery:
    with closing(LocalSession("csd0", home, {"HOME": str(home)})) as session:
        return deliver(session, pack_payload([stored]))


def lock(home: Path) -> None:
    fleet = Fleet((Node("csd0", "127.0.0.1", python=sys.executable),))
    with (
        closing(LocalSession("csd0", home, {"HOME": str(home)})) as session,
        lock_machines({"csd0": session}, fleet, doing="tune", directory=home),
    ):
        pass


by_both = pytest.mark.parametrize("use", [send, lambda home, stored: lock(home)], ids=["deploy", "lock"])


class TestSharedDirectories:
    @pytest.mark.attack(6)
    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_doctor_writes_to_nothing_that_another_user_has_prepared(
        self, home: Path, tmp_path: Path, kind: str
    ) -> None:
        shared, victim = tmp_path / "shared", tmp_path / "victim"
        shared.mkdir()
        shared.chmod(0o1777)
        victim.write_text("precious")

        def prepare() -> None:
            """The probe's process id is known here, as it is to whoever fills the directory with all ids."""
            for place in (shared, home):
                taken = place / f".csdctl-doctor-{os.getpid()}"
                if kind == "pipe":
                    os.mkfifo(taken)
                else:
                    taken.symlink_to(victim)

        done = subprocess.run(
            build_command(CONDITION_FACTS, sys.executable),
            cwd=home,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(shared)},
            preexec_fn=prepare,
            capture_output=True,
            text=True,
            check=True,
        )
        assert victim.read_text() == "precious"
        trips = [ClockTrip(0.0, 0.0, "0.0")]
        condition = parse_facts("host", done.stdout, trips, CONDITION_FACTS, Condition)
        assert condition.home_space is not None
        assert condition.temporary_space is not None
        assert (condition.home_space.refusal, condition.temporary_space.refusal) == ("", "")
        assert len(list(shared.iterdir())) == len(list(home.iterdir())) == 1

    @pytest.mark.attack(6)
    def test_no_code_makes_up_a_name_in_a_shared_directory(self) -> None:
        """Names there come from mkdtemp or mktemp. What else mentions such a directory is listed here."""
        expected = {
            "standalone/leftovers.py": "finds what csdctl left there, and removes only its own",
            "runs/private.py": "the step file, in a directory of its user alone",
            "worker/protocol/run_spec.py": "names the step file, which the worker opens by open_private",
            "emulation/fleet.py": "finds the directories of a fleet, removes its own, and passes TMPDIR on",
            "facts/machine.py": "mktemp -d in TMPDIR",
        }
        root = Path(csdctl.__file__).parent
        place = re.compile(r"gettempdir\(|\bmktemp\(|/dev/shm|[\"'{ =:-]/tmp\b|/var/tmp|NamedTemporaryFile")
        mentioning = {
            str(path.relative_to(root)) for path in root.rglob("*.py") if place.search(path.read_text())
        }
        assert mentioning <= set(expected)


class TestStore:
    @pytest.mark.attack(7)
    @by_both
    def test_wider_directory_is_narrowed(
        self, home: Path, stored: StoredFile, use: Callable[[Path, StoredFile], object]
    ) -> None:
        (home / ".csdctl").mkdir()
        (home / ".csdctl").chmod(0o777)
        use(home, stored)
        assert mode_of(home / ".csdctl") == 0o700

    @pytest.mark.attack(7)
    def test_what_is_deployed_is_readable_by_its_user_alone(self, home: Path, stored: StoredFile) -> None:
        before = os.umask(0)
        try:
            send(home, stored)
            lock(home)
        finally:
            os.umask(before)
        modes = {str(path.relative_to(home)): oct(mode_of(path)) for path in home.rglob("*")}
        assert {path: mode for path, mode in modes.items() if int(mode, 8) & 0o077} == {}

    @needs_root
    @pytest.mark.attack(7)
    @by_both
    @pytest.mark.parametrize("kind", ["directory", "link"])
    def test_directory_of_another_user_is_refused(
        self, home: Path, tmp_path: Path, stored: StoredFile, use: Callable[..., object], kind: str
    ) -> None:
        state, aside = home / ".csdctl", tmp_path / "aside"
        aside.mkdir(mode=0o700)
        if kind == "directory":
            state.mkdir()
            give(state)
        else:
            state.symlink_to(aside)
            give(state)
        with pytest.raises(CsdctlError, match="belongs to another user") as raised:
            use(home, stored)
        assert "csd0" in str(raised.value)
        assert list(aside.iterdir()) == []

    @pytest.mark.attack(7)
    @by_both
    def test_home_that_every_user_can_change_is_refused(
        self, home: Path, stored: StoredFile, use: Callable[..., object]
    ) -> None:
        home.chmod(0o777)
        with pytest.raises(CsdctlError, match="can be changed by every user"):
            use(home, stored)
        home.chmod(0o1777)  # as /tmp: nobody can rename what belongs to others
        use(home, stored)

    @needs_root
    @pytest.mark.attack(7)
    @pytest.mark.parametrize("suffix", ["", ".part"])
    def test_file_of_another_user_is_replaced_even_with_the_right_content(
        self, home: Path, stored: StoredFile, suffix: str
    ) -> None:
        """Its owner could change it after it was checked."""
        (home / OBJECTS).mkdir(parents=True)
        planted = home / f"{stored.path}{suffix}"
        planted.write_bytes(b"content")
        planted.chmod(0o600)
        give(planted)
        with planted.open("r+b") as kept_open:
            assert send(home, stored).num_sent == 1
            kept_open.write(b"CHANGED")
        assert (home / stored.path).read_bytes() == b"content"
        assert (home / stored.path).stat().st_uid == os.geteuid()

    @pytest.mark.attack(6)
    @pytest.mark.parametrize("name", ["lock", "receive.lock", "part"])
    def test_nothing_is_written_through_a_link(
        self, home: Path, tmp_path: Path, stored: StoredFile, name: str
    ) -> None:
        (tmp_path / "victim").write_text("precious")
        (home / OBJECTS).mkdir(mode=0o700, parents=True)
        place = home / f"{stored.path}.part" if name == "part" else home / ".csdctl" / name
        place.symlink_to(tmp_path / "victim")
        with nullcontext() if name == "part" else pytest.raises(CsdctlError):
            lock(home) if name == "lock" else send(home, stored)
        assert (tmp_path / "victim").read_text() == "precious"
        assert mode_of(tmp_path / "victim") & 0o044
        assert name != "part" or (home / stored.path).read_bytes() == b"content"

    @needs_root
    @pytest.mark.attack(6)
    def test_lock_of_another_user_is_refused(self, home: Path) -> None:
        (home / ".csdctl").mkdir(mode=0o700)
        (home / ".csdctl" / "lock").write_text("{}")
        give(home / ".csdctl" / "lock")
        with pytest.raises(InputError, match="belongs to another user"):
            lock(home)

    @pytest.mark.attack(7)
    def test_worker_and_function_that_were_swapped_do_not_run(self, tmp_path: Path) -> None:
        worker = store_bytes(pack_worker(), ".pyz", tmp_path)
        function = store_bytes(b"def load(path):\n    return []\n", ".py", tmp_path)
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "sample").write_text("x")
        function.source.write_text("print('the neighbour was here')\ndef load(path):\n    return []\n")
        spec = PrepareSpec("data", "store", function=f"{function.path}:load", is_private=True)
        with closing(LocalSession("csd0", tmp_path, {"HOME": str(tmp_path)})) as session:
            prepare = build_worker_command(sys.executable, worker.path, ["prepare"])
            done = session.run(prepare, stdin=to_json(spec).encode() + b"\n")
            assert b"has been changed since csdctl sent it" in done.stdout
            assert done.exit_code == 1
            worker.source.write_bytes(b"print('the neighbour was here')")
            done = session.run(prepare, stdin=to_json(spec).encode() + b"\n")
        assert b"has been changed since csdctl sent it" in done.stderr
        assert "neighbour" not in done.output


class TestProject:
    @pytest.mark.attack(15)
    def test_files_that_the_user_names_are_private_too(self, tmp_path: Path) -> None:
        (tmp_path / "fleet.yaml").write_text("nodes: [{name: csd0, address: 10.9.8.7}]\n")
        command = [str(CSDCTL), "inventory", "--output", "hosts.ini"]
        subprocess.run(command, cwd=tmp_path, umask=0, check=True)
        assert mode_of(tmp_path / "hosts.ini") == 0o600

    @pytest.mark.attack(15)
    def test_wider_state_is_narrowed_by_any_command(self, tmp_path: Path) -> None:
        (tmp_path / ".csdctl").mkdir()
        (tmp_path / ".csdctl").chmod(0o775)
        refuse(tmp_path, "report")
        assert mode_of(tmp_path / ".csdctl") == 0o700

    @needs_root
    @pytest.mark.attack(15)
    def test_state_of_another_user_is_refused_by_any_command(self, tmp_path: Path) -> None:
        """Another user may have prepared host keys, plans and runs, such as in /tmp."""
        (tmp_path / ".csdctl").mkdir(mode=0o700)
        give(tmp_path / ".csdctl")
        assert "belongs to another user" in refuse(tmp_path, "report")
