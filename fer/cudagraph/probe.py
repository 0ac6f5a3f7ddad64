"""What a graph computes from fixed inputs and a fixed cache, as digests that two processes can compare.

Two probes of each graph. The shallow one decodes at position 0: nothing of the cache is read but what the step itself
writes, so it can be repeated in an engine at work. The deep one decodes far into a cache that holds a fixed pattern,
which repeats every :data:`PATTERN` bytes. A process that proves an archive has no room for a second cache and maps one
small slab over and over instead; the pattern looks the same through it, and where the slab is as long as
:func:`alias` says, no layer sees what another one wrote. All deep probes come before all shallow ones, and a row's
position is the same in all deep probes, so what one graph leaves in the cache is never read by the next.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fer.cudagraph.archive import Content
from fer.engines.graphs import DEEP, SHALLOW

if TYPE_CHECKING:
    import torch

    from fer.cudagraph.archive import Archive
    from fer.cudagraph.libcuda import Cuda
    from fer.engines.graphs import DecodeGraphs

PATTERN: Final = 2 << 20
"""Bytes after which the pattern in the cache repeats: the granularity of GPU memory."""

LARGEST_SLAB: Final = 2 << 30
"""Bytes of the slab that stands for a cache, at most; a cache that needs more gets no deep probes."""

SAMPLES: Final = 1024
"""Elements of an output that are kept where its digest would mean nothing."""

CLOSE: Final = 5e-2
"""Difference that passes, relative to an output's largest element: a wrong pointer is off by more than rounding."""

FAR: Final = 2e-1
"""Difference that passes at most, however far apart native replays were: beyond it nothing would be proven."""

TRIES: Final = 8
"""Replays until one gives the recorded bits; all alike and none of them right means a wrong graph."""

ON_HOST: Final = 4 << 20
"""Bytes of outputs up to which a digest is made on the host."""

NUMBERS: Final = (DEEP, SHALLOW)

Replay = Callable[[], None]
Digest = tuple[str, str]
"""Of the deep and of the shallow probe; ``""`` for one that was not made or that two native replays disagree on."""


def fill_pattern(cuda: Cuda, address: int, size: int) -> None:
    """Write the pattern: bytes that are small finite numbers in every format of a cache. Raises DriverError."""
    number = np.arange(PATTERN, dtype=np.uint64)
    block = ((number * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) & np.uint64(15) | np.uint64(0x30)).astype("<u1")
    done = min(PATTERN, size)
    cuda.call("to_device", address, block.ctypes.data, done)
    while done < size:
        length = min(done, size - done)
        cuda.call("device_copy", address + done, address, length)
        done += length
    cuda.call("synchronize")  # graphs run in streams that do not wait for this one


def alias(layers: Sequence[Sequence[tuple[int, int]]], granule: int) -> int:
    """Bytes of the shortest slab that can stand for a cache, 0 where none of at most :data:`LARGEST_SLAB` can.

    Args:
        layers: offset in the range and bytes of each layer's tensors.

    Tensors of different layers may share memory if they share all of it: each writes a position before it reads it.
    Those of one layer may not.
    """
    spans = [span for layer in layers for span in layer]
    if not spans:
        return granule
    whole = -(-max(offset + size for offset, size in spans) // granule) * granule
    starts = sorted(offset for offset, _ in spans)
    strides = {after - before for before, after in itertools.pairwise(starts)}
    stride = strides.pop() if len(strides) == 1 else 0
    repeated = [stride * times for times in range(1, 9)] if stride and stride % granule == 0 else []
    for slab in [*repeated, whole]:
        if slab <= min(LARGEST_SLAB, whole) and _apart(layers, slab):
            return slab
    return 0


def _apart(layers: Sequence[Sequence[tuple[int, int]]], slab: int) -> bool:
    places = {(offset % slab, size) for layer in layers for offset, size in layer}
    if any(len({offset % slab for offset, _ in layer}) < len(layer) for layer in layers):
        return False
    end = 0
    for offset, size in sorted(places):
        if offset < end or offset + size > slab:
            return False
        end = offset + size
    return True


def digest_of(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """128 bits of every output, in order of name, still on the device."""
    import torch

    return torch.stack([_device_digest(outputs[name]) for name in sorted(outputs)])


def hexed(digest: torch.Tensor) -> str:
    """A digest of :func:`digest_of` as text."""
    return hashlib.sha256(digest.cpu().numpy().tobytes()).hexdigest()


def text_of(outputs: Mapping[str, torch.Tensor]) -> str:
    """The digest of outputs as text. Small ones are copied and summed on the host.

    A process that serves in a moment has not loaded the kernels of :func:`digest_of`, and loading takes 0.1 s.
    """
    if sum(tensor.nbytes for tensor in outputs.values()) > ON_HOST:
        return hexed(digest_of(outputs))
    rows = [_host_digest(outputs[name]) for name in sorted(outputs)]
    return hashlib.sha256(np.array(rows, "<i8").tobytes()).hexdigest()


def _host_digest(tensor: torch.Tensor) -> list[int]:
    """What :func:`_device_digest` sums, with numpy's integers, which overflow alike."""
    import torch

    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    words = (plain.view("<i2") if len(plain) % 2 == 0 else plain).astype(np.int64) + 0x10001
    place = np.arange(1, len(words) + 1, dtype=np.int64) * 2 + 1
    mixed = words * (place * 0x5851F42D4C957F2D)
    other = words * (place * place * 0x14057B7EF767814F + 0x2545F4914F6CDD1D)
    return [int(mixed.sum()), int((other ^ (other >> 29)).sum())]


def _device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """128 bits that change with any bit of a tensor: two sums modulo 2**64, each word weighted by its place."""
    import torch

    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    half = plain.view(torch.int16) if plain.numel() % 2 == 0 else plain
    words = half.to(torch.int64) + 0x10001
    place = torch.arange(1, words.numel() + 1, device=tensor.device, dtype=torch.int64) * 2 + 1
    mixed = words * (place * 0x5851F42D4C957F2D)
    other = words * (place * place * 0x14057B7EF767814F + 0x2545F4914F6CDD1D)
    return torch.stack([mixed.sum(), (other ^ (other >> 29)).sum()])


def probe_name(graph: str, number: int) -> str:
    """Beginning of the names of the inputs of one probe."""
    return f"probe/{graph}/{number}/"


def sample_name(graph: str, number: int) -> str:
    """Beginning of the names of the samples of one probe's outputs."""
    return f"sample/{graph}/{number}/"


def sample_of(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Up to :data:`SAMPLES` elements of every floating-point output, evenly spread, as float32 on the device."""
    import torch

    found = {}
    for name, tensor in outputs.items():
        if tensor.is_floating_point():
            flat = tensor.detach().reshape(-1)
            found[name] = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].to(torch.float32, copy=True)
    return found


def judge(
    archive: Archive, graph: str, number: int, recorded: str, outputs: Mapping[str, torch.Tensor], replay: Replay
) -> str:
    """Whether a graph does what it did when it was recorded: why not, ``""`` if it does.

    Args:
        recorded: the digest of the probe, ``""`` where native replays differed.
        replay: puts the probe's inputs in place, replays, and waits.

    One replay that gives the recorded bits is proof, since no wrong pointer does. Kernels that add in no fixed order
    (attention, split products, scattered experts) may need several, or never give the same bits twice; then a sample of
    the outputs has to be near. Whole numbers chosen by comparing such values are not compared.
    """
    import torch

    found = set()
    for _ in range(TRIES):
        replay()
        found.add(text_of(outputs))
        if recorded in found:
            return ""
    if recorded and len(found) == 1:
        return "its outputs are not the recorded ones"
    spread = archive.facts["unlike"].get(graph, {}).get(str(number), 0.0)
    samples, prefix, compared = sample_of(outputs), sample_name(graph, number), False
    for content in archive.contents:
        if content.name.startswith(prefix):
            label, compared = content.name.removeprefix(prefix), True
            wanted = torch.frombuffer(bytearray(content.data), dtype=torch.float32)
            away = float((samples[label].cpu() - wanted).abs().max())
            largest = float(wanted.abs().max())
            allowed = max(CLOSE * largest, min(4 * spread, FAR * largest))
            if not away <= allowed:
                return f"its output {label} is {away:.3g} away from the recorded one, {allowed:.3g} would pass"
    return "" if compared else "its replays differ, and no output of it can be compared"


def write_inputs(cuda: Cuda, contents: Sequence[Content], graph: str, number: int) -> None:
    """Put the recorded inputs of a probe where they were. Raises DriverError."""
    prefix = probe_name(graph, number)
    for content in contents:
        if content.name.startswith(prefix):
            data = ctypes.create_string_buffer(content.data, len(content.data))
            cuda.call("to_device", content.address, ctypes.addressof(data), len(content.data))


@dataclass
class Native:
    """Probes of captured graphs: :meth:`launch` gives the GPU its work, :meth:`digests` waits for what comes of it.

    Args:
        replays: what replays each graph, and its outputs, by name and batch size.
        inputs: small tensors to be kept as they were in each probe.
        numbers: the probes to be made, in this order: each of all graphs before the next.

    Attributes:
        random: graphs that moved torch's random generator on.
    """

    graphs: DecodeGraphs
    replays: Mapping[str, tuple[int, Callable[[], None], Mapping[str, torch.Tensor]]]
    inputs: Mapping[str, torch.Tensor]
    numbers: Sequence[int]
    random: set[str] = field(default_factory=set)
    _found: dict[tuple[str, int], list[tuple[Any, Mapping[str, Any]]]] = field(default_factory=dict)
    _kept: list[tuple[str, int, Any]] = field(default_factory=list)

    def launch(self, name: str, number: int, times: int) -> None:
        """Give the GPU one probe of one graph; from the second time on it shows whether the graph is reproducible."""
        import torch

        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        size, replay, outputs = self.replays[name]
        with torch.inference_mode():
            offset = generator.get_offset()
            found = self._found.setdefault((name, number), [])
            for again in range(times):
                self.graphs.fill(size, number)  # again, since a step may write its own inputs
                if not again:
                    self._keep_inputs(name, number)
                replay()
                found.append((digest_of(outputs), sample_of(outputs)))
            if generator.get_offset() != offset:
                self.random.add(name)

    def unlike(self, number: int) -> set[str]:
        """Graphs whose outputs differ between two replays of a probe; waits for the GPU."""
        import torch

        rows = {name: found for (name, which), found in self._found.items() if which == number}
        same = [(torch.stack([digest for digest, _ in found]) == found[0][0]).all() for found in rows.values()]
        answers = torch.stack(same).tolist() if same else []
        return {name for name, answer in zip(rows, answers, strict=True) if not answer}

    def digests(self) -> dict[str, Digest]:
        """What came of all probes."""
        lost = {(name, number) for number in self.numbers for name in self.unlike(number)}
        texts = {key: "" if key in lost else hexed(found[0][0]) for key, found in self._found.items()}
        return {name: (texts.get((name, DEEP), ""), texts.get((name, SHALLOW), "")) for name in self.replays}

    def samples(self) -> tuple[dict[str, dict[str, float]], list[Content]]:
        """How far apart replays of a probe were where they differed, by graph and number; a sample of every probe."""
        import torch

        spreads: dict[str, dict[str, float]] = {}
        labels: list[str] = []
        values: list[torch.Tensor] = []
        for (name, number), found in self._found.items():
            for label, sample in found[0][1].items():
                labels.append(f"{sample_name(name, number)}{label}")
                values.append(sample)
        for number in self.numbers:
            for name in sorted(self.unlike(number)):
                first, second = (sample for _, sample in self._found[name, number][:2])
                far = [float((first[label] - second[label]).abs().max()) for label in first]
                spreads.setdefault(name, {})[str(number)] = max(far, default=0.0)
        whole = torch.cat(values).cpu().numpy() if values else np.zeros(0, "<f4")
        ends = np.cumsum([len(each) for each in values], dtype=np.int64).tolist()
        parts = zip(labels, [0, *ends], ends, strict=False)
        return spreads, [Content(label, 0, whole[start:end].tobytes()) for label, start, end in parts]

    def _keep_inputs(self, name: str, number: int) -> None:
        import torch

        for label, tensor in self.inputs.items():
            plain = tensor.contiguous().reshape(-1).view(torch.uint8)
            self._kept.append((probe_name(name, number) + label, tensor.data_ptr(), plain.clone()))

    def contents(self) -> list[Content]:
        """The inputs of all probes."""
        import torch

        if not self._kept:
            return []
        data = torch.cat([plain for _, _, plain in self._kept]).cpu().numpy().tobytes()
        found, at = [], 0
        for name, address, plain in self._kept:
            found.append(Content(name, address, data[at : at + len(plain)]))
            at += len(plain)
        return found


def replay_probe(graphs: DecodeGraphs, size: int, number: int, replay: Callable[[], None]) -> None:
    """One probe of a graph that an engine has. The cache must hold the pattern for a deep one."""
    import torch

    with torch.inference_mode():
        graphs.fill(size, number)
        replay()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def replay_digest(
    graphs: DecodeGraphs, size: int, number: int, replay: Callable[[], None], outputs: Mapping[str, torch.Tensor]
) -> str:
    """The digest of what :func:`replay_probe` leaves."""
    replay_probe(graphs, size, number, replay)
    return text_of(outputs)
