"""What is drawn of a client's tokens: text and page show the same gap, and escape what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from fer.cli.demo_failover import WAYS, Seen, Way
from fer.cli.failover_picture import page, strip
from fer.errors import PeerRefused, UsageError
from fer.standby import admin


def seen(way: Way, gap: float) -> Seen:
    times = [-0.3, -0.2, -0.1, gap - 0.1, gap, gap + 0.1]
    outage = {"path": "standby", "promotion": {"backing": 0.001}, "active": 0.01, "token": 0.2}
    return Seen(way=way, tokens=times, text="text", gap_s=gap, outage=outage)


def test_the_text_has_a_line_a_way_with_its_gap() -> None:
    text = strip([seen(WAYS[0], 0.2), seen(WAYS[2], 4.0)])
    *_, fast, slow, _ = text.split("\n")
    assert fast.startswith("standby") and fast.endswith("0.200 s")
    assert slow.startswith("plain") and slow.endswith("4.000 s")
    assert fast.count("x") == slow.count("x") == 1
    assert slow.count(".") > 5 * fast.count("."), "the gap is as long as it was"


def test_the_page_shows_the_same_and_escapes() -> None:
    way = Way("odd", "<b>odd</b>", ())
    text = page([seen(way, 0.2), seen(WAYS[2], 4.0)])
    assert "&lt;b&gt;odd&lt;/b&gt;: 0.200 s" in text and "<b>odd" not in text
    assert text.count('class="token"') == 12 and text.count('class="gap"') == 2
    assert "backing 0.001 s, active 0.01 s, token 0.2 s" in text
    assert "<script" not in text and "http" not in text


def test_one_service_is_found_and_several_have_to_be_named(runtime_dir: Path) -> None:
    place = runtime_dir
    with pytest.raises(UsageError, match="no fer serve runs"):
        admin.only(admin.find(place))
    for name in ("serve-1-1", "serve-2-2"):
        (place / name).mkdir(mode=0o700)
        (place / name / admin.ADMIN).touch()
        if name == "serve-1-1":
            assert admin.only(admin.find(place)) == place / name / admin.ADMIN
    with pytest.raises(UsageError, match="2 services run here"):
        admin.only(admin.find(place))
    with pytest.raises(UsageError, match="no fer serve answers"):
        admin.ask(place / "serve-1-1" / admin.ADMIN, "POST", "/admin/switch")
    (place / "serve-1-1").chmod(0o755)
    with pytest.raises(PeerRefused):
        admin.ask(place / "serve-1-1" / admin.ADMIN, "POST", "/admin/switch")
