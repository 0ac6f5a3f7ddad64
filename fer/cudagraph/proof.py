"""The proof of an archive: a throw-away child restores it and compares every graph's outputs with the recorded ones.

A wrong pointer ends in a sticky error that would take the context with it, so the first replay of restored graphs
happens in a process that serves nobody. The child attaches the weights read-only, has a small key/value cache mapped
over and over in place of a second real one, and writes the recorded inputs. Until it has ended well the archive is
``unproven`` and no start uses it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fer.cudagraph import archive as archives
from fer.cudagraph import state
from fer.cudagraph.archive import Archive
from fer.errors import ArchiveError, FerError, from_dict

if TYPE_CHECKING:
    from fer.cudagraph.libcuda import Cuda
    from fer.memory.ranges import Ranges

log = logging.getLogger("fer")

LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class Request:
    """What the child is told, as JSON on its standard input."""

    archive: str
    ordinal: int
    checkpoint: str
    edition: str
    runtime_dir: str


def begin(
    path: Path, *, ordinal: int, checkpoint: str, edition: str, runtime_dir: Path | None, worth: bool
) -> threading.Thread | None:
    """Prove an archive in the background; the outcome is written beside it and logged."""
    digest = archives.facts_of(path)[1]
    if not worth:
        state.save(path, state.State(digest, "failed", "none of its graphs can be kept"))
        return None
    request = Request(str(path), ordinal, checkpoint, edition, str(runtime_dir or ""))
    thread = threading.Thread(target=prove, args=(request, digest), name="fer-graph-proof", daemon=True)
    thread.start()
    return thread


def prove(request: Request, digest: str) -> state.State:
    """Run the child and write down what came of it."""
    known = state.State(digest)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fer.cudagraph.proof"],
            check=False,
            input=json.dumps(vars(request)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        _judge(known, done.returncode, done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        known.why = f"the proof did not end within {LIMIT_S:.0f} s"
    except OSError as error:
        known.why = f"the proof could not be started: {error}"
    try:
        state.save(Path(request.archive), known)
    except ArchiveError as error:
        log.warning("the proof of %s could not be written down: %s", request.archive, error)
    log.info("proof of graphs: %s%s", known.proof, f" ({known.why})" if known.why else "")
    return known


def _judge(known: state.State, code: int, out: str, err: str) -> None:
    """From the child's end to a state. A child that died proves the archive wrong; one that lacked memory nothing."""
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        if "error" in answer:
            error = from_dict(answer["error"])
            known.why = str(error)
            return
        wrong = {str(name): str(why) for name, why in answer["wrong"].items()}
        proven = int(answer["proven"])
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        known.proof, known.why = "failed", f"the child ended with {code}: {(err.strip().splitlines() or [''])[-1]}"
        return
    known.quarantined = wrong
    known.proof = "proven" if proven else "failed"
    known.why = "" if proven else "no graph gave its recorded outputs"


# -- in the child --------------------------------------------------------------------------------------------------


def main() -> int:
    """Entry point of the child: one JSON object on stdout."""
    request = Request(**json.load(sys.stdin))
    try:
        answer = run(request)
    except FerError as error:
        answer = {"error": error.to_dict()}
    sys.stdout.write(json.dumps(answer, default=str) + "\n")
    sys.stdout.flush()
    return 0


def run(request: Request) -> dict[str, Any]:
    """Restore and compare; ``{"proven": count, "wrong": {graph: why}}``.

    Raises:
        FerError: the proof cannot be made here, which says nothing against the archive.
    """
    from fer.cudagraph.libcuda import open_cuda
    from fer.cudagraph.restore import Restorer, place
    from fer.memory import ranges as memory
    from fer.memory.device import CudaDevice

    archive = archives.read(Path(request.archive))
    device = CudaDevice(request.ordinal)
    keep: list[Any] = []
    ranges = memory.reserve(device)
    if request.edition:
        keep.append(_attach(request))
    kv = archive.facts["kv"]
    # Twice the largest tensor and a bit: keys and values of one layer, side by side, never fall on each other.
    ranges.kv.map_over_and_over(kv["bytes"], 2 * kv["largest"] + (2 << 20))
    ranges.static.map(archive.facts["ranges"]["static"]["used"])
    import torch

    torch.cuda.set_device(request.ordinal)
    torch.zeros(1, device="cuda")  # torch sets itself up at first use
    cuda = open_cuda(restoring=True)
    ready: dict[str, Any] = {}
    with device.current():
        place(archive, cuda, ranges)
        order = [graph.name for graph in archive.tables.top()]
        restorer = Restorer(archive, cuda, ready.__setitem__, order=order, context=device.context, keep=[ranges, keep])
        restorer.run()
    refused = archive.facts.get("refused", {})
    wrong = {name: why for name, why in restorer.progress.failed.items() if name not in refused}
    golden = archive.facts["golden"].get(request.checkpoint, {})
    for name, graph in ready.items():
        if not golden.get(name):
            wrong[name] = "two native replays differ: its outputs cannot be compared"
        elif _outputs(archive, cuda, name, graph, ranges, request.ordinal) != golden[name]:
            wrong[name] = "its outputs are not the recorded ones"
    return {"proven": len([name for name in ready if name not in wrong]), "wrong": wrong}


def _outputs(archive: Archive, cuda: Cuda, name: str, graph: Any, ranges: Ranges, ordinal: int) -> list[str]:
    import torch

    from fer.cudagraph.restore import outputs_of
    from fer.cudagraph.save import PROBES, digest_of, probe_name

    outputs = outputs_of(archive, name, f"cuda:{ordinal}", ranges)
    found = []
    for number in range(PROBES):
        prefix = probe_name(name, number)
        for content in archive.probes:
            if content.name.startswith(prefix):
                data = ctypes.create_string_buffer(content.data, len(content.data))
                cuda.call("to_device", content.address, ctypes.addressof(data), len(content.data))
        graph.replay()
        torch.cuda.synchronize()
        found.append(digest_of(outputs))
    return [hashlib.sha256(each.cpu().numpy().tobytes()).hexdigest() for each in found]


def _attach(request: Request) -> Any:
    """The weights of the engine that saved, read-only, where they lie there."""
    from fer.memory.open import open_backend
    from fer.weights.client import KeeperClient

    client = KeeperClient.connect(Path(request.runtime_dir) if request.runtime_dir else None, label="fer graphs proof")
    leased = client.lease(request.edition)
    backend = open_backend(f"cuda:{request.ordinal}", "vmm")
    device = [(info, fd) for info, fd in leased.slabs if info.kind == "cuda"]
    mapped = backend.attach_many([(fd, info.size, info.address) for info, fd in device])
    return client, leased, mapped


if __name__ == "__main__":
    raise SystemExit(main())
