"""``fer doctor`` as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import fer

pytestmark = pytest.mark.timeout(180)


def test_a_machine_like_this_is_fit() -> None:
    done = fer("doctor", "--json", fresh=True)
    assert done.code == 0, done.out
    assert done.json["worst"] in {"ok", "warn"}
    assert all(set(check) == {"check", "level", "found", "fix"} for check in done.json["checks"])


def test_text_and_json_say_the_same() -> None:
    text, data = fer("doctor").out, fer("doctor", "--json").json
    for check in data["checks"]:
        assert check["check"].split()[0] in text
    for level in ("ok", "warn", "fail"):
        assert f"{sum(check['level'] == level for check in data['checks'])} {level}" in text


def test_a_failure_has_its_own_code(tmp_path: Path) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    done = fer("doctor", "--json", FER_RUNTIME_DIR=str(place))
    assert done.code == 8
    (bad,) = (check for check in done.json["checks"] if check["level"] == "fail" and "directory" in check["check"])
    assert "chmod" in bad["fix"] or "Remove" in bad["fix"]


def test_a_broken_settings_file_does_not_stop_it(tmp_path: Path) -> None:
    settings = tmp_path / "fer.toml"
    settings.write_text('verify = "maybe"\n')
    done = fer("doctor", "--json", FER_CONFIG=str(settings))
    assert done.code == 8
    assert json.dumps(str(settings))[1:-1] in done.out
