"""``fer switch``: a standby takes over from the active engine, as planned."""

from __future__ import annotations

from fer.cli.flags import Admin, RuntimeDir
from fer.cli.output import JsonFlag, emit, escape, guarded
from fer.cli.settings import settings


def switch(
    admin: Admin = None,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Make a standby of a running `fer serve` the active engine.

    Running answers end where they are, requests that come meanwhile wait, and none fails. The former engine stands by.
    """
    with guarded(json):
        from fer.standby.admin import ask, find, only

        options = settings(runtime_dir=runtime_dir)
        answer = ask(admin or only(find(options.runtime_dir)), "POST", "/admin/switch")
        emit(json, answer, lambda console: console.print(f"active: {escape(str(answer['active']))}"))
