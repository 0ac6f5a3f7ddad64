"""The proof of an archive: a throw-away child restores it and compares every graph's outputs with the recorded ones.

A wrong pointer ends in a sticky error that would take the context with it, so the first replay of restored graphs
happens in a process that serves nobody. The child attaches the weights read-only, has a small key/value cache mapped
over and over in place of a second real one, and writes the recorded inputs. Until it has ended well the archive is
``unproven`` and no start uses it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fer import __version__
from fer.cudagraph import archive as archives
from fer.cudagraph import state
from fer.cudagraph.archive import Archive
from fer.cudagraph.restore import Restorer, outputs_of, place
from fer.errors import ArchiveError, FerError, MappingError, OutOfMemory, from_dict
from fer.memory.patience import lacks_memory

if TYPE_CHECKING:
    from fer.cudagraph.libcuda import Cuda
    from fer.memory.ranges import Ranges

log = logging.getLogger("fer")

LIMIT_S: Final = 300.0
_CHILDREN: Final = 4
"""Children to go through at most: each may die of another graph."""

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Request:
    """What the child is told, as JSON on its standard input.

    Attributes:
        skip: graphs that an earlier child died of.
    """

    archive: str
    ordinal: int
    checkpoint: str
    edition: str
    runtime_dir: str
    skip: tuple[str, ...] = ()


def begin(
    path: Path, *, ordinal: int, checkpoint: str, edition: str, runtime_dir: Path | None, worth: bool
) -> threading.Thread | None:
    """Prove an archive in the background; the outcome is written beside it and logged."""
    digest = archives.facts_of(path)[1]
    if not worth:
        state.save(path, state.State(digest, "failed", "none of its graphs can be kept", by=__version__))
        return None
    request = Request(str(path), ordinal, checkpoint, edition, str(runtime_dir or ""))
    thread = threading.Thread(target=prove, args=(request, digest), name="fer-graph-proof", daemon=True)
    thread.start()
    return thread


def prove(request: Request, digest: str) -> state.State:
    """Run the child, again without the graph it died of where it did, and write down what came of it."""
    known = state.State(digest, by=__version__)
    for _ in range(_CHILDREN):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "fer.cudagraph.proof"],
                check=False,
                input=json.dumps(vars(request)),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=LIMIT_S,
            )
            died_of = _judge(known, done.returncode, done.stdout, done.stderr)
        except subprocess.TimeoutExpired:
            known.proof, known.why = "unproven", f"the proof did not end within {LIMIT_S:.0f} s"
            break
        except OSError as error:
            known.proof, known.why = "unproven", f"the proof could not be started: {error}"
            break
        if not died_of:
            break
        request = replace(request, skip=(*request.skip, died_of))
    try:
        state.save(Path(request.archive), known)
    except ArchiveError as error:
        log.warning("the proof of %s could not be written down: %s", request.archive, error)
    log.info("proof of graphs: %s%s", known.proof, f" ({known.why})" if known.why else "")
    return known


def _judge(known: state.State, code: int, out: str, err: str) -> str:
    """From the child's end to a state; the graph it could not go on after, ``""`` for none.

    A child that crashed proves the archive wrong; one that lacked memory, or that somebody killed, proves nothing.
    """
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        if "error" in answer:
            known.proof, known.why = "unproven", str(from_dict(answer["error"]))
            return ""
        known.quarantined |= {str(name): str(why) for name, why in answer["wrong"].items()}
        proven, died_of = int(answer["proven"]), str(answer.get("died_of", ""))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        last = (err.strip().splitlines() or [""])[-1]
        known.proof = "unproven" if code in (-signal.SIGKILL, -signal.SIGTERM) else "failed"
        known.why = f"the child ended with {code}: {last}"
        died_of = _at(out) if code < 0 and known.proof == "failed" else ""
        if died_of:
            known.quarantined[died_of] = f"its replay ended the child with {_signal(code)}"
        return died_of
    known.proof = "proven" if proven and not died_of else "failed"
    nothing = f"the child could not go on after {died_of}" if died_of else "no graph gave its recorded outputs"
    known.why = "" if known.proof == "proven" else nothing
    return died_of


def _at(out: str) -> str:
    """The graph that a child was replaying when it fell silent."""
    try:
        return str(json.loads(out.strip().splitlines()[-1])["at"])
    except (ValueError, IndexError, KeyError, TypeError):
        return ""


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# -- in the child --------------------------------------------------------------------------------------------------


def main() -> int:
    """Entry point of the child: JSON lines on stdout, each graph before its replay, and the answer as the last."""
    # Whoever asked has died: nobody would hear the answer, and the memory is wanted by his successor.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    told = json.load(sys.stdin)
    request = Request(**{**told, "skip": tuple(told["skip"])})
    try:
        answer = run(request)
    except FerError as error:
        answer = {"error": error.to_dict()}
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        answer = {"error": OutOfMemory("the proof lacks memory", why=str(error).splitlines()[0]).to_dict()}
    _say(answer)
    return 0


def _say(row: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(row, default=str) + "\n")
    sys.stdout.flush()


def run(request: Request) -> dict[str, Any]:
    """Restore and compare; ``{"proven": count, "wrong": {graph: why}}``.

    Raises:
        FerError: the proof cannot be made here, which says nothing against the archive.
    """
    from fer.cudagraph.libcuda import open_cuda
    from fer.memory import ranges as memory
    from fer.memory.device import CudaDevice

    archive = archives.read(Path(request.archive))
    if request.checkpoint not in archive.facts["golden"]:
        raise MappingError("the graphs cannot be compared", why="their outputs were recorded with other weights")
    device = CudaDevice(request.ordinal)
    keep: list[Any] = []
    ranges = memory.reserve(device)
    if request.edition:
        keep.append(_attach(request, archive))
    kv = archive.facts["kv"]
    ranges.kv.map_over_and_over(kv["bytes"], kv["slab"])
    ranges.static.map(archive.facts["ranges"]["static"]["used"])
    import torch

    torch.cuda.set_device(request.ordinal)
    torch.zeros(1, device="cuda")  # torch sets itself up at first use
    cuda = open_cuda(restoring=True)
    ready: dict[str, Any] = {}
    with device.current():
        place(archive, cuda, ranges)
        order = [graph.name for graph in archive.tables.top() if graph.name not in request.skip]
        restorer = Restorer(archive, cuda, ready.__setitem__, order=order, context=device.context, keep=[ranges, keep])
        restorer.run()
    failed, starved = restorer.progress.failed, sorted(restorer.progress.passing)
    if starved:
        raise FerError("not every graph can be restored here", why=f"{starved[0]}: {failed[starved[0]]}")
    wrong = {name: failed.get(name, "it was not restored") for name in order if name not in ready}
    golden = archive.facts["golden"][request.checkpoint]
    begin = time.perf_counter()
    died_of = _compare(archive, cuda, ready, ranges, golden, wrong)
    seconds = {**restorer.progress.seconds, "replays": time.perf_counter() - begin}
    return {
        "proven": len([name for name in ready if name not in wrong]),
        "wrong": wrong,
        "died_of": died_of,
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
    }


def _compare(
    archive: Archive,
    cuda: Cuda,
    ready: Mapping[str, Any],
    ranges: Ranges,
    golden: Mapping[str, Any],
    wrong: dict[str, str],
) -> str:
    """Replay every probe of every graph; ``wrong`` gets why a graph is not what it was.

    Returns:
        The graph after which the context was lost, ``""`` if it is well.
    """
    from fer.cudagraph.probe import NUMBERS, fill_pattern, judge
    from fer.engines.graphs import DEEP

    kv = archive.facts["kv"]
    if kv["deep"]:
        tail = kv["bytes"] // kv["slab"] * kv["slab"]
        fill_pattern(cuda, ranges.kv.address, min(kv["slab"], kv["bytes"]))
        if 0 < tail < kv["bytes"]:
            fill_pattern(cuda, ranges.kv.address + tail, kv["bytes"] - tail)
    for number in NUMBERS:
        if number == DEEP and not kv["deep"]:
            continue
        for name, graph in ready.items():
            _say({"at": name})  # a signal leaves no other word
            recorded = golden.get(name, ("", ""))[NUMBERS.index(number)]
            try:
                outputs = outputs_of(archive, name, f"cuda:{ranges.device.ordinal}", ranges)
                why = judge(archive, name, number, recorded, outputs, _replay(archive, cuda, name, number, graph))
                if why:
                    wrong[name] = why
            except (FerError, RuntimeError) as error:  # torch's word for an illegal access; it stays for good
                if lacks_memory(error):
                    raise
                wrong[name] = f"its replay failed: {str(error).splitlines()[0]}"
                return name
    return ""


def _replay(archive: Archive, cuda: Cuda, name: str, number: int, graph: Any) -> Callable[[], None]:
    def replay() -> None:
        write_inputs(cuda, archive.probes, name, number)
        graph.replay()
        cuda.call("synchronize")

    from fer.cudagraph.probe import write_inputs

    return replay


def _attach(request: Request, archive: Archive) -> Any:
    """The weights of the engine that saved, read-only, where they lie there.

    Raises:
        MappingError: they do not lie where the graphs look for them.
    """
    from fer.memory.open import open_backend
    from fer.weights.client import KeeperClient

    client = KeeperClient.connect(Path(request.runtime_dir) if request.runtime_dir else None, label="fer graphs proof")
    leased = client.lease(request.edition)
    backend = open_backend(f"cuda:{request.ordinal}", "vmm")
    device = [(info, fd) for info, fd in leased.slabs if info.kind == "cuda"]
    mapped = backend.attach_many([(fd, info.size, info.address) for info, fd in device])
    spans = sorted((info.address, info.address + info.size) for info, _ in device)
    for name, address, size in archive.facts["owners"]:
        if name.startswith("weight/") and not any(low <= address and address + size <= high for low, high in spans):
            raise MappingError(
                f"{name} does not lie where the graphs look for it", why="the weights were laid out anew"
            )
    return client, leased, mapped


if __name__ == "__main__":
    raise SystemExit(main())
