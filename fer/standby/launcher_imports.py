"""What a template imports and makes before it serves, and who of it has spoiled the process."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

from fer import warm
from fer.errors import FerError, OptionError
from fer.hush import hushed
from fer.standby import launcher_fit as fit

log = logging.getLogger("fer.launcher")

DEFAULT = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "fer.orchestrator",
    "fer.weights.stage",
    "fer.engines.transformers",
    "fer.standby.duty",
    "fer.standby.model",
    # What a start imports at the moment it needs it: of no use to who starts no engine, and all of it to who does.
    "fer.cudagraph.check",
    "fer.cudagraph.probe",
    "fer.cudagraph.stage",
    "fer.engines.cache",
    "fer.engines.decode",
    "fer.engines.devices",
    "fer.engines.wake",
    "fer.kernels.compat",
    "fer.kernels.inductor",
    "fer.kernels.registry",
    "fer.kernels.session",
    "fer.kernels.stage",
    "fer.kernels.unpack",
    "fer.kernels.warm",
    "fer.kernels.writer",
    "fer.memory.cuda",
    "fer.memory.ipc",
    "fer.standby.cohort",
    "fer.standby.ledger",
    "fer.weights.attach",
    "cuda.bindings.driver",
)
"""Where nothing else is asked for; what is not installed is left out. One model, for what all of them share."""
_LAZY = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "StaticCache")
"""Names that Transformers imports when they are asked for."""


class Imports:
    """Imports modules and makes tokenizers, and keeps an eye on what each leaves behind.

    Attributes:
        done: modules and folders, in order.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self._seen: dict[str, str] = {}
        self._look("the interpreter's start")

    def modules(self, names: Sequence[str]) -> None:
        """Import modules, those of :data:`DEFAULT` if there are none.

        Raises:
            OptionError: one that was named cannot be imported.
        """
        for name in names or [n for n in DEFAULT if importlib.util.find_spec(n.split(".")[0]) is not None]:
            try:
                with hushed():
                    module = importlib.import_module(name)
                    if name == "transformers":
                        for lazy in _LAZY:
                            getattr(module, lazy)
            except Exception as error:  # an import may raise anything
                if not names:
                    log.warning("not imported: %s (%s: %s)", name, type(error).__name__, error)
                    continue
                raise OptionError(
                    f"{name} cannot be imported",
                    why=f"{type(error).__name__}: {error}",
                    fix="Leave it out of --import.",
                ) from error
            self.done.append(name)
            self._look(f"the import of {name}")

    def folder(self, folder: Path) -> None:
        """Hold tokenizer and configuration of a model folder, and import its classes. Failures are logged."""
        from fer.engines import pretrained

        folder = folder.resolve()
        try:
            import transformers

            with hushed():
                for name in pretrained.architectures(folder):
                    getattr(transformers, name, None)
            warm.hold("config", folder, lambda: pretrained.config_of(folder, {}))
            warm.hold("tokenizer", folder, lambda: pretrained.tokenizer_of(folder))
        except (FerError, ImportError, OSError) as error:
            log.warning("%s is not held ready: %s", folder, error)
        self._look(f"the tokenizer of {folder}")

    def culprits(self, fault: str) -> str:
        """A fault, with who brought it about."""
        named = {by for what, by in self._seen.items() if what.split(" (")[0] in fault}
        return f"{fault}, since {' and '.join(sorted(named))}" if named else fault

    def _look(self, when: str) -> None:
        for what in [*fit.threads(), *fit.devices()]:
            self._seen.setdefault(what, when)
