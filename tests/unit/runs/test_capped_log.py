from pathlib import Path

from csdctl.runs.directory import MAX_LINE_BYTES, CappedLog

LIMIT = 1 << 20
SAID = "… further output of csd1 is dropped after 1 MiB\n"


def test_lines_are_appended_without_null_characters_and_long_ones_are_cut(tmp_path: Path) -> None:
    for _ in range(2):
        log = CappedLog(tmp_path / "log", "csd1")
        log.write(b"one\0 two\r\n")
        log.close()
    assert (tmp_path / "log").read_bytes() == b"one two\n" * 2
    log = CappedLog(tmp_path / "long", "csd1")
    log.write(b"x" * (1 << 20))
    log.close()
    assert (tmp_path / "long").stat().st_size == MAX_LINE_BYTES + 1


def test_file_ends_at_its_limit_and_says_so_once_whoever_writes(tmp_path: Path) -> None:
    first, second = (CappedLog(tmp_path / "log", "csd1", LIMIT) for _ in range(2))
    for _ in range(LIMIT // 500):
        first.write(b"x" * 999)
        second.write(b"y" * 999)
    first.close()
    second.close()
    third = CappedLog(tmp_path / "log", "csd1", LIMIT)
    third.write(b"z")
    third.close()
    text = (tmp_path / "log").read_text()
    assert text.endswith(f"\n{SAID}")
    assert text.count("…") == 1
    assert len(text) < LIMIT + 2 * len(SAID)


def test_log_that_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "missing" / "log", "csd1")
    log.write(b"x")
    log.close()
    full = CappedLog(Path("/dev/full"), "csd1")
    full.write(b"x")
    full.close()
