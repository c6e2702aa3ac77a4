from pathlib import Path

import pytest

from csdctl.documents import load_json
from csdctl.errors import InputError


@pytest.mark.fault(36)
def test_truncated_json_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": ')
    with pytest.raises(InputError, match="cannot be read") as raised:
        load_json(tmp_path / "file")
    assert "create it again" in raised.value.remedy
    with pytest.raises(InputError, match="does not exist"):
        load_json(tmp_path / "other")
