"""Evolution from Python, with the names that the documents of the phase use.

    evomerge = EvoMerge(EvoMergeConfig(generations=20, data=["maths.jsonl"]))
    evomerge.register_callback("generation", lambda n, best, diversity: print(n, best, diversity))
    result = await evomerge.evolve([model1, model2, model3])   # networks or folders

Networks in memory are written to the output folder first, so that a killed evolution goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from agent_forge.contract.phase import PhaseResult
from agent_forge.errors import ConfigError
from agent_forge.merge.output import write
from agent_forge.model.hf import config_dict
from agent_forge.model.locate import TRUNK
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.model.weights import from_memory
from agent_forge.phases.phase2_evomerge import documents
from agent_forge.phases.phase2_evomerge.checkpoints import continued
from agent_forge.phases.phase2_evomerge.checks import IN_MEMORY, refuse_place
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings, MeasuredEvolutionSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import find_evolution, locate_inputs, made_beside
from agent_forge.phases.phase2_evomerge.mirror import mirrored
from agent_forge.phases.phase2_evomerge.report import artifacts, summary
from agent_forge.platform import find_device
from agent_forge.store import files

Model = nn.Module | str | Path
GenerationCallback = Callable[[int, float, float], object]


class DocumentedSettings(documents.RunPlace, MeasuredEvolutionSettings):
    """The settings of an evolution, where it runs and what it leaves."""


class EvoMergeConfig:
    """All settings of an evolution, by either of their names; checked whenever they change."""

    settings: DocumentedSettings

    def __init__(self, **fields: Any) -> None:
        settings = documents.validated(
            DocumentedSettings, documents.in_our_words(fields), type(self).__name__, fields
        )
        self.__dict__.update(settings=settings, _given=fields)

    def __setattr__(self, name: str, value: Any) -> None:
        same = {name, documents.FIELDS.get(name), documents.ALIASES.get(name)}
        kept = {key: v for key, v in self.__dict__["_given"].items() if key not in same}
        EvoMergeConfig.__init__(self, **kept, **{name: value})

    def __getattr__(self, name: str) -> Any:
        if documents.FIELDS.get(name, name) not in DocumentedSettings.model_fields:
            raise AttributeError(f"there is no setting {name!r}")
        return getattr(self.settings, documents.FIELDS.get(name, name))

    @property
    def evolution(self) -> EvoMergeSettings:
        settings = self.__dict__["settings"]
        names = settings.model_fields_set & set(EvoMergeSettings.model_fields)
        return EvoMergeSettings.model_validate({name: getattr(settings, name) for name in names})

    @property
    def target_device(self) -> str:
        """Where to measure; a device that is not there is refused."""
        return find_device(self.settings.measured_on, "device='auto' finds one")


class EvoMerge:
    """The evolution of the documents: configure, watch, evolve, go on."""

    def __init__(self, config: EvoMergeConfig | None = None) -> None:
        self.config = config or EvoMergeConfig()
        self._callbacks: list[GenerationCallback] = []
        self._checkpoint: Path | None = None

    def register_callback(self, event: str, callback: GenerationCallback) -> None:
        """Call back with generation, best fitness and diversity after every generation."""
        if event != "generation":
            raise ConfigError(f"nothing is told of {event!r}", hint="the event is 'generation'")
        self._callbacks.append(callback)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on with the generation of this checkpoint, in a folder of its own if there are later
        ones; the models have to be given again."""
        self._checkpoint = find_evolution(continued(Path(path)))[0]

    async def evolve(self, models: Sequence[Model], names: Sequence[str] = ()) -> PhaseResult:
        """Evolve networks or folders into one, without blocking whoever waits."""
        return await asyncio.to_thread(self.run, models, names)

    def run(self, models: Sequence[Model], names: Sequence[str] = ()) -> PhaseResult:
        began, config, device = time.monotonic(), self.config.settings, self.config.target_device
        folder = self._checkpoint or Path(config.output_dir)
        refuse_place(folder, [])  # before networks are written there
        refs = [self._ref(m, folder / f"{IN_MEMORY}{i + 1}") for i, m in enumerate(models)]
        settings = self.config.evolution
        if not config.enable_parallel:
            settings = settings.model_copy(update={"workers": 1})
        base = config.base or trunk_of(models)
        inputs = locate_inputs(settings, refs, base, config.seed, folder, names=names)
        with mirrored(self._tell, config, settings, folder) as listen:
            done = run_evolution(inputs, device=device, listen=listen)
        figures = summary(done.loop)
        left = artifacts(done.loop, done.report, done.model.path)
        left["healing"] = done.healed.record if done.healed else None
        model, seconds = open_model(done.model.path).network, time.monotonic() - began
        return PhaseResult(True, model, "evomerge", figures, left, seconds)

    def _tell(self, record: Mapping[str, Any]) -> None:
        own = record["event"] == "generation" and "replicate" not in record
        for callback in self._callbacks if own else ():
            callback(record["generation"], record["best"], record["diversity"])

    def _ref(self, network: Model, folder: Path) -> str:
        """What names a model; a network in memory is written to the folder, with its tokenizer."""
        if not isinstance(network, nn.Module):
            return str(network)
        own = getattr(network, "folder", None) or getattr(network, "name_or_path", None)
        place = self.config.tokenizer or own
        if not place or not Path(place).is_dir():
            hint = "give EvoMergeConfig(tokenizer=FOLDER), or the model as a folder"
            raise ConfigError("a network in memory does not say where its tokenizer is", hint=hint)
        state = dict(network.state_dict())
        if isinstance(network, ForgeNetwork):
            config = config_dict(network.settings)
        else:
            config = network.config.to_diff_dict()  # type: ignore[union-attr,operator]
            config["architectures"] = [type(network).__name__]
            if config.get("tie_word_embeddings"):
                state.pop("lm_head.weight", None)
        weights = from_memory(state)
        weights.config, weights.folder = config, Path(place)
        if not folder.exists():
            write(weights, folder)
            return str(folder)
        with files.building(folder) as built:  # what is there may be of an evolution, or somebody's
            write(weights, built)
            if files.verify(built) != files.verify(folder):
                hint = "give the same networks, or another output_dir"
                raise ConfigError(f"{folder} holds another network of an evolution", hint=hint)
        return str(folder)


def trunk_of(models: Sequence[Model]) -> str | None:
    """The trunk of specialists that were opened from one run of Phase 1: it lies beside them."""
    folders = {getattr(model, "folder", None) for model in models}
    trunks = {made_beside(Path(folder), TRUNK) if folder else None for folder in folders}
    return trunks.pop() if len(trunks) == 1 else None
