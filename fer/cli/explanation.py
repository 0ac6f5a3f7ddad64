"""What ``fer explain`` finds: would this model attach, and if not, what differs from what is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fer.cli.output import escape, place, table

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class NearEdition:
    """A kept edition that does not fit.

    Attributes:
        gpu: where it is held.
        differences: field, value here, value kept; empty where only the GPU differs.
    """

    edition: str
    gpu: str
    rank: str
    differences: list[tuple[str, str, str]]


@dataclass(kw_only=True)
class Explanation:
    """The answer. ``edition`` is the one that would be attached, ``""`` if none; ``unknown`` fields never match."""

    model: str
    gpu: str
    group: str
    rank: str
    edition: str = ""
    why: str = ""
    reasons: list[str] = field(default_factory=list)
    near: list[NearEdition] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def would_attach(self) -> bool:
        return bool(self.edition)

    def to_json(self) -> dict[str, Any]:
        return {"would_attach": self.would_attach, **asdict(self)}

    def print(self, console: Console) -> None:
        console.print(
            f"{escape(self.model)} on {self.gpu}, fingerprint {self.group[:12]}, rank {escape(place(self.rank))}"
        )
        if self.would_attach:
            console.print(f"[green]would attach[/] edition {self.edition[:12]}: {escape(self.why)}")
            return
        console.print("[bold]would miss[/]")
        for name in self.unknown:
            console.print(f"  {escape(name)} could not be determined here, and unknown never matches")
        if not self.near:
            for reason in self.reasons:
                console.print(f"  {escape(reason)}")
        for near in self.near:
            held = "" if near.gpu == self.gpu else f", held on {near.gpu}"
            console.print(f"  edition {near.edition[:12]}{held}, rank {escape(place(near.rank))}:")
            rows = table("field", "here", "kept")
            for name, here, kept in near.differences:
                rows.add_row(escape(name), escape(here), escape(kept))
            console.print(rows if near.differences else "    nothing else differs", style=None)


def explain(model: Path, *, device: str, dtype: str, runtime_dir: Path | None) -> Explanation:
    """Compare the fingerprint of a start here and now with everything the keeper holds. Reads no weights.

    One case reads the checkpoint's bytes: its files were copied or touched since the edition was made.

    Raises:
        KeeperUnavailable: no keeper runs.
        UsageError: the model cannot be started at all.
    """
    from fer.engines.devices import resolve
    from fer.engines.transformers import TransformersEngine
    from fer.fingerprint import Fingerprint
    from fer.fingerprint import explain as differences
    from fer.memory.open import open_backend
    from fer.weights import quantization
    from fer.weights.client import KeeperClient
    from fer.weights.lookup import Lookup

    engine = TransformersEngine(model, device=resolve(device), dtype=dtype)
    identity = engine.identity()
    quantization.check(identity.quantization, identity.quantization_config)
    with KeeperClient.connect(runtime_dir, label="fer explain") as client:
        lookup = Lookup(client, identity, open_backend(engine.device))
        chosen = lookup.choose()
        here = Fingerprint.from_json(lookup.fields)
        near = [] if chosen else client.find(lookup.key).near
    return Explanation(
        model=str(model),
        gpu=lookup.key.gpu,
        group=lookup.key.group,
        rank=lookup.key.rank,
        edition=chosen.edition if chosen else "",
        why=lookup.why,
        reasons=lookup.reasons,
        near=[
            NearEdition(
                edition=other.edition,
                gpu=other.gpu,
                rank=other.rank,
                differences=[
                    (d.field, str(d.left), str(d.right)) for d in differences(here, Fingerprint.from_json(other.fields))
                ],
            )
            for other in near
        ],
        unknown=here.unknown,
    )
