"""What FER asks of an engine.

An adapter describes the engine (:meth:`Engine.identity`), builds its empty module (:meth:`Engine.build`), loads it by
the engine's own full pipeline (:meth:`Engine.load`) and takes a finished module over (:meth:`Engine.adopt`). The
remaining methods are phases of a start that FER only times; their defaults do nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fer.engines.graphs import DecodeGraphs
    from fer.memory.kept import KeptMemory


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Sizes of the parallel groups of one launch and this process's place in each.

    ``local_size`` is how many ranks of the launch run on this host: that many editions make one group.
    ``launch`` names the launch and is the same on all its ranks; two starts of the same command differ in it.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    local_size: int = 1
    launch: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineIdentity:
    """All that decides the bytes of an engine's loaded module, apart from the environment.

    Attributes:
        engine, engine_version: adapter's name for the engine, and the engine's own version.
        model, revision: path (or name) as the engine was told it, and the revision.
        architecture: class of the model.
        quantization: method name, ``""`` where the weights are not quantised.
        quantization_config: the method's configuration, plain data.
        dtype: torch's name of the compute type, such as ``"bfloat16"``.
        overrides: configuration changed against what the model folder says, plain data.
        settings: switches that select kernels or weight layouts, plain data.
        packages: distributions whose version is part of the identity.
        sources: files whose content is part of the identity (local builders, remote code in the model folder).
        checkpoint: the files weights are read from.
        ranks: the parallel layout.
    """

    engine: str
    engine_version: str
    model: str
    revision: str = ""
    architecture: str = ""
    quantization: str = ""
    quantization_config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()
    sources: Sequence[Path] = ()
    checkpoint: Sequence[Path] = ()
    ranks: Ranks = Ranks()


class Engine(ABC):
    """One rank of an engine, as FER sees it.

    Attributes:
        device: torch's name of the device the weights live on, ``"cpu"`` or ``"cuda:0"``.
        mutable: ``fnmatch`` patterns of tensor paths (``"layers.*.running_mean"``) the engine writes while serving;
            these are copied on attach, everything else is mapped read-only.
    """

    device: str
    mutable: Sequence[str] = ()

    @abstractmethod
    def identity(self) -> EngineIdentity:
        """What decides the bytes of the loaded module. Reads configuration, never weights.

        Raises:
            UnsupportedQuantization, CheckpointError: before any loading work.
        """

    @abstractmethod
    def build(self) -> nn.Module:
        """The empty module. Called with ``meta`` as torch's default device; allocates nothing, reads no weights."""

    @abstractmethod
    def load(self) -> nn.Module:
        """The finished module, by the engine's own full pipeline: read, shard, quantise, post-process, move."""

    @abstractmethod
    def adopt(self, module: nn.Module) -> None:
        """Go on with this module, loaded or attached."""

    def import_code(self) -> None:
        """Import what the engine would import on first use: it belongs to the phase ``python``, not to what it delays.

        Touches no device, so that a launcher may do it ahead of the start.
        """

    def load_tokenizer(self) -> None:
        """Phase ``tokenizer``."""

    def init_distributed(self) -> None:
        """Phase ``distributed``: process groups; afterwards :meth:`identity` knows ranks and launch."""

    def alone(self) -> bool:
        """Whether :meth:`init_distributed` forms no process groups, so that nothing has to be in place before them."""
        return False

    def agree(self, flag: bool) -> bool:
        """True where every rank of the launch says True. Ranks must take the same path, attach or load."""
        return flag

    def allocate_kv(self) -> None:
        """Phase ``kv``."""

    def graphs(self) -> DecodeGraphs | None:
        """The decode graphs FER is to keep; None for an engine that has none, or captures its own.

        Asked before the weights are there; the same object every time.
        """
        return None

    def wake_libraries(self) -> None:
        """Have libraries make what they make when the device is used first: handles, workspaces, modules of kernels.

        Called in a thread of its own while weights are attached, in starts that record no modules. May do nothing.
        """

    def first_prompt(self) -> None:
        """Take a prompt without graphs, for the same reason, while those are restored. May do nothing.

        Called when weights and cache are there, and before :meth:`warm_up`; of several ranks, by none.
        """

    def warm_up(self) -> None:
        """Phase ``graphs``, after the cudagraph stage."""

    def first_token(self) -> None:
        """Produce one token; its end is the end of the start."""

    def self_test(self) -> None:
        """Make a token as answers that are under way do, before an engine that stood by serves; raises if it cannot.

        The cache may hold those answers: what it holds is the same afterwards. By default :meth:`first_token`.
        """
        self.first_token()

    def park(self) -> bool:
        """Let go of the cache's memory, or take next to none in the first place; called before or after
        :meth:`allocate_kv`, which then makes a cache that is only as large as :meth:`warm_up` needs it.

        Returns:
            whether the engine can: where not, it keeps its cache while it stands by.
        """
        return False

    def unpark(self, kept: KeptMemory | None = None) -> None:
        """Take the cache's memory again, zeroed; or ``kept``, with what an engine of the same cache left in it.

        Only an engine that keeps memory (:meth:`keep`) is given any, also one that is not parked.

        Raises:
            OutOfMemory: there is not enough; the engine is parked as before, and may be asked again.
            MappingError: ``kept`` is not this cache's memory; as before, too.
        """

    def keep(self) -> KeptMemory | None:
        """The cache's memory as descriptors, with which it outlives this process; None where it does not.

        The descriptors are the caller's. Memory at fixed addresses of a GPU is kept without the engine's help.
        """
        return None

    def estimated_bytes(self) -> int:
        """Device bytes that this rank's weights will need, 0 where unknown.

        By default the checkpoint's size, shared among the ranks that split the model.
        """
        identity = self.identity()
        ranks = identity.ranks
        shares = ranks.tp_size * ranks.pp_size * ranks.ep_size
        return -(-sum(path.stat().st_size for path in identity.checkpoint) // shares)
