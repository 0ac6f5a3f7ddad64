"""``fer kernels``: archives of compiled kernels, and what a start compiled. Most of it needs no GPU and no Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fer.cli.exit_codes import INTEGRITY, MISS
from fer.cli.flags import Home
from fer.cli.output import JsonFlag, count, emit, emit_differences, escape, guarded, size, table

if TYPE_CHECKING:
    from rich.console import Console

    from fer.kernels.manifest import Entry, Manifest

app = typer.Typer(name="kernels", help="Pack, move and check compiled kernels.", no_args_is_help=True)

Archive = Annotated[
    str, typer.Argument(help="An archive: a path, or a URL; @sha256:DIGEST pins it.", show_default=False)
]
Local = Annotated[Path, typer.Argument(help="An archive.", show_default=False)]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Triton's cache; by default where Triton looks.", show_default=False)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and write nothing.")]
WithoutCode = Annotated[bool, typer.Option("--without-code", help="Leave out what would run in the host's process.")]


@app.command("pack")
def pack(
    out: Annotated[str, typer.Argument(help="The archive to write: a path or a URL.", show_default=False)],
    cache: Cache = None,
    component: Annotated[
        list[str] | None, typer.Option("--component", help="Only this cache.", show_default=False)
    ] = None,
    arch: Annotated[
        list[int] | None, typer.Option("--arch", help="Only kernels for this GPU, such as 90.", show_default=False)
    ] = None,
    binary_only: Annotated[bool, typer.Option("--binary-only", help="Leave out what only people read.")] = False,
    without_code: WithoutCode = False,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign with this OpenSSH key, into OUT.sig.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Write an archive of the complete entries of caches. The same caches give the same bytes."""
    with guarded(json):
        from fer.kernels import pack as packing
        from fer.kernels import remote, store

        choice = packing.Choice(archs=tuple(arch or ()), binary_only=binary_only, code=not without_code)
        target = remote.Source.of(out)
        path = store.folder(home) / f"{store.SUFFIX}.{os.getpid()}" if target.is_url else Path(out).expanduser()
        packed = packing.pack(_roots(cache, component or ["triton"]), path, choice, dry_run=dry_run)
        length = path.stat().st_size if path.is_file() and not dry_run else 0
        if sign is not None and not dry_run:
            _sign(path, sign, target.is_url)
        if target.is_url and not dry_run:
            try:
                remote.send(path, target.place)
            finally:
                path.unlink(missing_ok=True)
        data = {
            "archive": out,
            "sha256": packed.digest,
            "bytes": length,
            "entries": [_plain(each) for each in packed.manifest.entries],
            "left_out": dict(packed.left_out),
        }

        def text(console: Console) -> None:
            entries = packed.manifest.entries
            verb = "Would pack" if dry_run else "Packed"
            console.print(f"{verb} {_entries(len(entries))} ({size(packed.manifest.bytes)}) into {escape(out)}")
            for name, why in packed.left_out.items():
                console.print(f"  left out {name[:12]}: {escape(why)}")
            if not dry_run:
                console.print(f"  {size(length)}, sha256:{packed.digest}")

        emit(json, data, text)


@app.command("unpack")
def unpack(
    archive: Archive,
    cache: Cache = None,
    component: Annotated[
        list[str] | None, typer.Option("--component", help="Only this cache.", show_default=False)
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Take code of the host too: you know who made it.")] = False,
    signers: Annotated[
        Path | None,
        typer.Option("--signers", help="OpenSSH's list of signers whose code is taken too.", show_default=False),
    ] = None,
    without_code: WithoutCode = False,
    compare: Annotated[bool, typer.Option(help="Compare with this machine and installation first.")] = True,
    dry_run: DryRun = False,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Restore an archive's entries where Triton and the others look for them, verified, each as a whole."""
    with guarded(json):
        from fer.errors import ArchiveIncompatible
        from fer.kernels import compat, remote
        from fer.kernels import unpack as unpacking

        terms = unpacking.Terms(
            code="take" if trust or signers is not None else "skip" if without_code else "refuse",
            here=(lambda made: compat.live(ask_triton=True, host=bool(made.host), home=home)) if compare else None,
            dry_run=dry_run,
        )
        path = remote.fetch(remote.Source.of(archive), home=home)
        with _vouched(path, signers) as vouched:
            outcome = unpacking.unpack(vouched, _roots(cache, component), terms)
        if outcome.manifest.entries and not outcome.usable:
            raise ArchiveIncompatible(
                f"nothing in {archive} can be used here",
                why="; ".join(sorted(set(outcome.skipped.values()))[:3]),
                fix="Pack it on a machine like this one; --no-compare restores it all the same",
                reasons=outcome.skipped,
            )
        data = {name: getattr(outcome, name) for name in ("restored", "kept", "healed", "skipped", "notes")}

        def text(console: Console) -> None:
            verb = "Would restore" if dry_run else "Restored"
            console.print(
                f"{verb} {_entries(len(outcome.restored))}; {len(outcome.kept)} were there, "
                f"{len(outcome.healed)} were damaged and are replaced, {len(outcome.skipped)} cannot be used here"
            )
            for name, why in list(outcome.skipped.items())[:10]:
                console.print(f"  skipped {name[:12]}: {escape(why)}")
            for note in outcome.notes:
                console.print(f"  note: {escape(note)}")

        emit(json, data, text)


@app.command("inspect")
def inspect(archive: Local, json: JsonFlag = False) -> None:
    """Say what an archive holds, by its manifest alone: no GPU, no torch, no Triton."""
    with guarded(json):
        from fer.kernels import compare as comparing
        from fer.kernels import unpack as unpacking
        from fer.kernels.registry import REGISTRY

        manifest, digest, length = unpacking.peek(archive)
        data = {
            "archive": str(archive),
            "bytes": length,
            "manifest_sha256": digest,
            "tool": manifest.tool,
            "raw_bytes": manifest.bytes,
            "entries": [_plain(each) for each in manifest.entries],
            "targets": manifest.targets,
            "host": manifest.host,
            "soft": manifest.soft,
        }

        def text(console: Console) -> None:
            console.print(
                f"{escape(str(archive))}: {_entries(len(manifest.entries))}, {size(manifest.bytes)} in {size(length)}"
            )
            for target in manifest.targets:
                env = ", ".join(f"{name}={value}" for name, value in (target.get("env") or {}).items())
                console.print(
                    f"  Triton {target.get('version', '?')}, {target.get('backend', '?')} {target.get('arch', '?')}"
                    f"{', ' + escape(env) if env else ''}"
                )
            rows = table("component", "what", "files", "bytes", "code", right=("files", "bytes"))
            for each in manifest.entries[:50]:
                name = escape(comparing.name_of(each))
                rows.add_row(each.component, name, str(len(each.files)), size(each.bytes), "yes" if each.code else "")
            console.print(rows)
            if len(manifest.entries) > 50:
                console.print(f"  and {len(manifest.entries) - 50} more; --json has all")
            for name in sorted({each.component for each in manifest.entries}):
                if name in REGISTRY and REGISTRY[name].traps:
                    console.print(f"  {name}: {REGISTRY[name].traps}")

        emit(json, data, text)


@app.command("verify")
def verify(
    archive: Annotated[
        Path | None, typer.Argument(help="An archive; Triton's cache by default.", show_default=False)
    ] = None,
    cache: Cache = None,
    json: JsonFlag = False,
) -> None:
    """Read an archive, or Triton's cache, to the last byte and compare every digest."""
    with guarded(json):
        from fer.kernels import store
        from fer.kernels import unpack as unpacking

        if archive is not None:
            checked, damaged = len(unpacking.verify(archive).entries), {}
            what = str(archive)
        else:
            root = _triton(cache)
            damaged = store.damage(root)
            checked, what = _count_entries(root), str(root)

        def text(console: Console) -> None:
            for name, why in damaged.items():
                console.print(f"{name}: {escape(why)}")
            console.print(f"{escape(what)}: {len(damaged)} of {_entries(checked)} damaged")

        emit(json, {"checked": what, "entries": checked, "damaged": damaged}, text)
        if damaged:
            raise typer.Exit(INTEGRITY)


@app.command("diff")
def diff(left: Local, right: Local, json: JsonFlag = False) -> None:
    """Say where two archives differ, and for a kernel that one lacks, which part of its key is another."""
    with guarded(json):
        from fer.kernels import compare as comparing
        from fer.kernels import unpack as unpacking

        found = comparing.archives(*(unpacking.peek(path)[0] for path in (left, right)))
        emit_differences(json, found)


@app.command("prune")
def prune(
    cache: Cache = None,
    days: Annotated[
        float | None,
        typer.Option("--older-than", help="Entries written more than so many days ago.", show_default=False),
    ] = None,
    most: Annotated[
        str | None,
        typer.Option("--max-size", help="The oldest entries beyond this size, such as 2GiB.", show_default=False),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--keep-version", help="Entries of other versions of Triton.", show_default=False)
    ] = None,
    archives: Annotated[bool, typer.Option("--archives", help="All of FER's archives, not only damaged ones.")] = False,
    dry_run: DryRun = False,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Remove damaged entries and archives, and on demand old ones; never what one of the last starts looked up."""
    with guarded(json):
        from fer.errors import OptionError
        from fer.kernels import store
        from fer.options import parse_bytes

        try:
            most_bytes = None if most is None else parse_bytes(most)
        except ValueError as error:
            raise OptionError(f"--max-size has the bad value {most!r}", fix=f"Give {error}", name="max-size") from None
        rules = store.Rules(
            older_than_s=None if days is None else days * 86400,
            most_bytes=most_bytes,
            version=version or "",
            damaged=True,
            dry_run=dry_run,
        )
        gone = store.prune_cache(_triton(cache), rules, home=home)
        gone += store.prune_archives(home, everything=archives, dry_run=dry_run)

        def text(console: Console) -> None:
            for each in gone:
                console.print(
                    f"{'Would remove' if dry_run else 'Removed'} {escape(str(each.path))}: {escape(each.why)}"
                )
            console.print(
                f"{_entries(len(gone))}, {size(sum(each.bytes for each in gone))}" if gone else "Nothing to remove."
            )

        emit(json, {"removed": [{**vars(each), "path": str(each.path)} for each in gone]}, text)


@app.command("coverage")
def coverage(
    archive: Annotated[
        Path | None, typer.Argument(help="An archive; by default the last start.", show_default=False)
    ] = None,
    cache: Cache = None,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Say what the last start compiled and why; of an archive, which of its kernels a start here would not find."""
    with guarded(json):
        data = _expected(archive, cache, home) if archive is not None else _last_start(home)

        def text(console: Console) -> None:
            console.print(
                f"{escape(data['of'])}: {count(data['hits'], 'hit')}, {data['missed']} not"
                + (f", {data['compile_s']:.3f} s of compiling" if "compile_s" in data else "")
            )
            rows = table("kernel", "why")
            for each in data["kernels"]:
                rows.add_row(escape(each["kernel"]), escape(each["why"]))
            if data["kernels"]:
                console.print(rows)

        emit(json, data, text)
        if archive is not None and data["missed"]:
            raise typer.Exit(MISS)


@app.command("warm")
def warm(
    archive: Archive,
    module: Annotated[
        list[str] | None, typer.Option("--import", help="A module with kernels to import first.", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Kernels prepared at once.")] = 4,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Prepare an archive's recorded kernels for the GPU that is here, ahead of the first engine."""
    with guarded(json):
        from fer.errors import UsageError
        from fer.kernels import hooks, remote
        from fer.kernels import unpack as unpacking
        from fer.kernels import warm as warming

        path = remote.fetch(remote.Source.of(archive), home=home)
        manifest = unpacking.peek(path)[0]
        hooks.install(home=home)
        try:
            wanted = warming.specializations(map(manifest.parts_of, manifest.entries))
            done = warming.warm(wanted, threads=threads, modules=module or ())
        except ImportError as error:
            raise UsageError("a module cannot be imported", why=str(error), fix="Check --import") from error

        def text(console: Console) -> None:
            console.print(f"Prepared {count(len(done.ready), 'kernel')} in {done.seconds:.3f} s")
            if not wanted:
                console.print("  no kernel of it was recorded at a call: a start under FER records them")
            for name, why in done.failed.items():
                console.print(f"  not {escape(name)}: {escape(why)}")

        emit(json, vars(done), text)


def _sign(path: Path, key: Path, is_url: bool) -> None:
    from fer.errors import UsageError
    from fer.kernels import signature

    if is_url:
        raise UsageError(
            "a signature goes beside a file", why="OUT is a URL", fix="Pack to a path, and send both files"
        )
    signature.sign(path, key)


def _vouched(path: Path, signers: Path | None) -> AbstractContextManager[Path]:
    """The archive to read; with signers, the very file whose signature was verified."""
    if signers is None:
        return nullcontext(path)
    return _verified(path, signers)


@contextmanager
def _verified(path: Path, signers: Path) -> Iterator[Path]:
    from fer.kernels import signature

    with signature.verified(path, signers) as (vouched, _):
        yield vouched


def _roots(cache: Path | None, only: list[str] | None) -> dict[str, Path]:
    from fer.errors import OptionError
    from fer.kernels.registry import REGISTRY

    for name in only or ():
        if name not in (*REGISTRY, "all"):
            known = ", ".join(("all", *sorted(REGISTRY)))
            raise OptionError(f"{name} is no component", fix=f"Give one of {known}", name="component")
    found = {}
    for name, component in REGISTRY.items():
        root = cache if name == "triton" and cache is not None else component.where(os.environ)
        if root is not None and (not only or name in only or "all" in only):
            found[name] = root
    return found


def _triton(cache: Path | None) -> Path:
    from fer.errors import UsageError
    from fer.kernels.components import triton_root

    root = cache or triton_root(os.environ)
    if root is None:
        raise UsageError("Triton has no cache here", why="HOME is not set", fix="Give --cache")
    return root


def _count_entries(root: Path) -> int:
    from fer.kernels import entry

    return sum(1 for _ in entry.entries_in(str(root)))


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def _plain(each: Entry) -> dict[str, Any]:
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(each)
    data["files"] = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in each.files]
    return data


def _expected(archive: Path, cache: Path | None, home: Path | None) -> dict[str, Any]:
    from fer.kernels import compare as comparing
    from fer.kernels import compat
    from fer.kernels import unpack as unpacking

    manifest: Manifest = unpacking.peek(archive)[0]
    here = compat.live(ask_triton=True, host=bool(manifest.host), home=home)
    found = list(comparing.expected(manifest, _triton(cache), here))
    missed = [{"kernel": comparing.name_of(each.entry), "why": each.why} for each in found if each.why]
    return {"of": str(archive), "hits": len(found) - len(missed), "missed": len(missed), "kernels": missed}


def _last_start(home: Path | None) -> dict[str, Any]:
    from fer.kernels import coverage as covering
    from fer.kernels import store
    from fer.kernels import unpack as unpacking

    starts = store.starts(home)
    if not starts:
        from fer.errors import UsageError

        raise UsageError("no start has recorded anything", fix="Start an engine with FER, or give an archive")
    records = covering.read(starts[-1])
    compiled = {record.key for record in records if not record.hit}
    kept = []
    for path in store.archives(home):
        manifest = unpacking.peek(path)[0]
        # What this start compiled has been written back by now, and explains nothing.
        kept += [manifest.parts_of(each) for each in manifest.entries if each.path not in compiled]
    told = covering.summary(records, kept)
    kernels = [{"kernel": name, "why": why} for name, why in told.missed]
    seconds = told.compile_ms / 1e3
    return {"of": str(starts[-1]), "hits": told.hits, "missed": told.compiled, "compile_s": seconds, "kernels": kernels}
