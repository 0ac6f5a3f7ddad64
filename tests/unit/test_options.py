"""Settings: precedence, refusal by name, warnings about variables."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fer import options
from fer.errors import OptionError
from fer.options import KeeperOptions, Options, known_variables, parse_bytes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No fer.toml of the developer is found, and every test sees its own warnings."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(options, "_warned", set())
    return folder


def test_argument_wins_over_variable_over_file_over_default(elsewhere: Path) -> None:
    (elsewhere / "fer.toml").write_text('mode = "off"\nverify = "full"\nwait_s = 5\n')
    environ = {"FER_MODE": "client", "FER_VERIFY": "off"}
    found = Options.load(environ=environ, mode="daemon")
    assert (found.mode, found.verify, found.wait_s, found.on_miss) == ("daemon", "off", 5.0, "load")
    assert found.sources["mode"] == "argument"
    assert found.sources["verify"] == "FER_VERIFY"
    assert found.sources["wait_s"] == str(elsewhere / "fer.toml")
    assert found.sources["on_miss"] == "default"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FER_HOME", str(tmp_path))
    assert Options.load().home == tmp_path


def test_named_file_wins_over_local_and_user_files(elsewhere: Path, tmp_path: Path) -> None:
    user = tmp_path / "config" / "fer" / "fer.toml"
    user.parent.mkdir(parents=True)
    user.write_text("wait_s = 1")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert Options.load(environ=environ).wait_s == 1
    (elsewhere / "fer.toml").write_text("wait_s = 2")
    assert Options.load(environ=environ).wait_s == 2
    (tmp_path / "named.toml").write_text("wait_s = 3")
    assert Options.load(environ={**environ, "FER_CONFIG": str(tmp_path / "named.toml")}).wait_s == 3


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="FER_CONFIG"):
        Options.load(environ={"FER_CONFIG": str(tmp_path / "nowhere.toml")})


@pytest.mark.parametrize("text", ["mode = ", "\x00", 'mode = "off"\nmode = "off"'])
def test_a_file_that_is_no_toml_is_refused(elsewhere: Path, text: str) -> None:
    (elsewhere / "fer.toml").write_text(text)
    with pytest.raises(OptionError, match=r"fer\.toml is not valid TOML"):
        Options.load(environ={})


def test_unknown_keys_of_a_file_are_refused_with_the_nearest(elsewhere: Path) -> None:
    (elsewhere / "fer.toml").write_text('on_mis = "fail"')
    with pytest.raises(OptionError, match=r"'on_mis' is unknown.*on_miss") as caught:
        Options.load(environ={})
    assert caught.value.fields["name"] == "on_mis"


def test_unknown_keys_of_the_keeper_table_stop_an_engine_too(elsewhere: Path) -> None:
    (elsewhere / "fer.toml").write_text("[keeper]\nbudget_edition = 2")
    for cls in (Options, KeeperOptions):
        with pytest.raises(OptionError, match="budget_editions"):
            cls.load(environ={})


def test_unknown_tables_and_a_table_that_is_none_are_refused(elsewhere: Path) -> None:
    (elsewhere / "fer.toml").write_text("[kepper]\n")
    with pytest.raises(OptionError, match="Did you mean keeper"):
        Options.load(environ={})
    (elsewhere / "fer.toml").write_text("keeper = 3")
    with pytest.raises(OptionError, match="must be a table"):
        KeeperOptions.load(environ={})


def test_unknown_arguments_are_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'modes' is unknown\. Did you mean mode\?"):
        Options.load(environ={}, modes="off")
    with pytest.raises(OptionError, match="'speed' is unknown"):
        Options().replace(speed=1)
    with pytest.raises(OptionError, match="'sources' is unknown"):
        Options.load(environ={}, sources={"mode": "me"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "demon"),
        ("mode", True),
        ("on_miss", ""),
        ("wait_s", -1),
        ("wait_s", "soon"),
        ("wait_s", float("nan")),
        ("wait_s", float("inf")),
        ("wait_s", True),
        ("weights", "maybe"),
        ("weights", 1.0),
        ("slab_bytes", -1),
        ("slab_bytes", "12 parsecs"),
        ("home", ""),
        ("home", 3),
        ("home", "a\0b"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"argument {name} has the bad value"):
        Options.load(environ={}, **{name: value})
    with pytest.raises(OptionError, match=f"argument {name} has the bad value"):
        Options(**{name: value})  # type: ignore[arg-type]


def test_bad_values_say_where_they_stand(elsewhere: Path) -> None:
    with pytest.raises(OptionError, match=r"FER_WAIT_S has the bad value 'soon'.*Give seconds"):
        Options.load(environ={"FER_WAIT_S": "soon"})
    (elsewhere / "fer.toml").write_text("verify = true")
    with pytest.raises(OptionError, match=r"fer\.toml: verify has the bad value True.*off, fast, full"):
        Options.load(environ={})


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Options.load(environ={"FER_MODE": ""}).mode == "daemon"


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_stages_can_be_switched_off_by_variable(text: str) -> None:
    assert Options.load(environ={"FER_WEIGHTS": text}).weights is False


def test_unknown_variables_are_warned_about_once_with_the_nearest() -> None:
    with pytest.warns(UserWarning, match=r"FER_MOD is no variable.*Did you mean FER_MODE\?"):
        Options.load(environ={"FER_MOD": "off"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options.load(environ={"FER_MOD": "off"})


def test_variables_of_kubernetes_and_of_the_scripts_are_left_alone() -> None:
    made = ["FER_PORT", "FER_PORT_80_TCP_ADDR", "FER_SERVICE_HOST", "FER_SERVICE_PORT_HTTP"]
    ours = ["FER_CONFIG", "FER_HOME", "FER_RUNTIME_DIR", "FER_TORCH_INDEX", "FER_LOG", "FER_KEEPER_ALLOW_UIDS"]
    assert set(ours) <= known_variables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Options.load(environ=dict.fromkeys(made, "tcp://10.0.0.1:80"))
        Options.load(environ={"FER_TORCH_INDEX": "x", "FER_LOG": "debug"})


def test_a_plug_in_may_bring_other_defaults() -> None:
    assert Options.load(environ={}, defaults={"mode": "off"}).mode == "off"
    assert Options.load(environ={"FER_MODE": "client"}, defaults={"mode": "off"}).mode == "client"


def test_replace_keeps_the_rest_and_notes_the_source() -> None:
    before = Options.load(environ={"FER_VERIFY": "full"})
    after = before.replace(mode="client", on_miss=None)
    assert (after.mode, after.verify, after.on_miss) == ("client", "full", "load")
    assert (after.sources["mode"], after.sources["verify"]) == ("argument", "FER_VERIFY")
    assert before.mode == "daemon"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        ("4096", 4096),
        ("120GiB", 120 << 30),
        ("1.5 GB", 1_500_000_000),
        ("2k", 2000),
        ("9007199254740993", 2**53 + 1),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_with_suffix(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1.5.2GB", "-1", "1e9", True, None, 1.5, "٣GiB"])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match="120GiB"):
        parse_bytes(text)


def test_keeper_settings(elsewhere: Path) -> None:
    (elsewhere / "fer.toml").write_text('[keeper]\nbudget_bytes = "120GiB"\nallow_uids = [1000, 1001]\n')
    found = KeeperOptions.load(environ={"FER_KEEPER_BUDGET_EDITIONS": "3"})
    assert (found.budget_editions, found.budget_bytes, found.allow_uids) == (3, 120 << 30, (1000, 1001))
    again = KeeperOptions.load(environ={"FER_KEEPER_BUDGET_BYTES": "none", "FER_KEEPER_ALLOW_UIDS": "7,8"})
    assert (again.budget_bytes, again.allow_uids) == (None, (7, 8))


@pytest.mark.parametrize(("name", "value"), [("budget_editions", -1), ("budget_editions", 1.5), ("allow_uids", [True])])
def test_bad_keeper_settings(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        KeeperOptions.load(environ={}, **{name: value})


def test_the_table_documents_every_setting() -> None:
    for cls in options.CLASSES:
        for setting in cls.settings():
            assert setting.doc
            assert setting.variable.startswith("FER_")
            assert setting.flag == "--" + setting.name.replace("_", "-")
            assert setting.parse(setting.default) == setting.default
    assert {s.name: s.choices for s in Options.settings()}["mode"] == ("daemon", "client", "off")
