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
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from agent_forge.config.load import did_you_mean, validate
from agent_forge.config.settings import PhaseSettings, Settings
from agent_forge.contract.phase import PhaseResult
from agent_forge.errors import ConfigError
from agent_forge.merge.output import write
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.model.weights import from_memory
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolve import (
    GIVEN,
    Evolved,
    Job,
    evolve,
    opened,
    refuse_place,
)
from agent_forge.track.wandb_sink import WandbSink

Model = nn.Module | str | Path
Told = Callable[[int, float, float], object]
# What the documents call one thing: the second name is ours.
ALIASES = {
    "elite_size": "elite_count",
    "max_generations": "generations",
    "mutation_strength": "mutation_sigma",
    "plateau_patience": "convergence_patience",
    "plateau_threshold": "convergence_threshold",
    "checkpoint_dir": "output_dir",
    "num_workers": "workers",
}
WANDB_PATIENCE_S = 30.0


class ExecutionSettings(Settings):
    """Where an evolution runs and what it leaves."""

    seed: int = Field(42, ge=0, lt=2**63, description="of every random choice")
    base: str | None = Field(None, description="what the models were fine-tuned from")
    tokenizer: str | None = Field(
        None, description="folder with the tokenizer of networks in memory, if they name none"
    )
    output_dir: str = Field("evomerge", description="folder of journal, checkpoints and champion")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="to measure on")
    fitness_device: Literal["", "auto", "cpu", "cuda", "mps"] = Field(
        "", description="the same, and stronger: merging is done by the CPU in any case"
    )
    enable_parallel: bool = Field(True, description="false: one worker, whatever their number")
    wandb_project: str = Field("", description="mirror the generations there, offline")


EVOLUTION = set(EvoMergeSettings.model_fields) - set(PhaseSettings.model_fields)
AROUND = set(ExecutionSettings.model_fields)


class EvoMergeConfig:
    """All settings of an evolution, by the names of the documents; checked whenever they change."""

    evolution: EvoMergeSettings
    around: ExecutionSettings

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "_given", {})
        self._change(fields)

    def __setattr__(self, name: str, value: Any) -> None:
        self._change({name: value})

    def __getattr__(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name in EVOLUTION:
            return getattr(self.evolution, name)
        if name in AROUND:
            return getattr(self.around, name)
        raise AttributeError(f"there is no setting {name!r}")

    def _change(self, fields: Mapping[str, Any]) -> None:
        given = {**self.__dict__["_given"], **named(fields)}
        source = type(self).__name__
        evolution = {k: v for k, v in given.items() if k in EVOLUTION}
        around = {k: v for k, v in given.items() if k in AROUND}
        checked = {
            "_given": given,
            "evolution": validate(EvoMergeSettings, evolution, source),
            "around": validate(ExecutionSettings, around, source),
        }
        self.__dict__.update(checked)

    @property
    def target_device(self) -> str:
        """Where to measure; a device that is not there is refused."""
        wanted = self.around.fitness_device or self.around.device
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if wanted == "auto":
            return next((name for name in there if there[name]), "cpu")
        if not there.get(wanted, True):
            raise ConfigError(f"device {wanted!r} is not there", hint="device='auto' finds one")
        return wanted


def named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by our names. Two names of one thing have to agree, and every name has to be known."""
    found: dict[str, Any] = {}
    for given, value in fields.items():
        name = ALIASES.get(given, given)
        if name not in EVOLUTION | AROUND:
            known = [*EVOLUTION, *AROUND, *ALIASES]
            raise ConfigError(f"there is no setting {name!r}{did_you_mean(name, known)}")
        value = str(value) if isinstance(value, Path) else value
        if name in found and found[name] != value:
            raise ConfigError(f"{given} and {name} are one thing: {value!r} and {found[name]!r}")
        found[name] = value
    return found


class EvoMerge:
    """The evolution of the documents: configure, watch, evolve, go on."""

    def __init__(self, config: EvoMergeConfig | None = None) -> None:
        self.config = config or EvoMergeConfig()
        self._callbacks: list[Told] = []
        self._checkpoint: Path | None = None

    def register_callback(self, event: str, told: Told) -> None:
        """Be told generation, best fitness and diversity after every generation."""
        if event != "generation":
            raise ConfigError(f"nothing is told of {event!r}", hint="the event is 'generation'")
        self._callbacks.append(told)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on with the evolution of this checkpoint; its models have to be given again."""
        self._checkpoint = opened(Path(path))[0]

    async def evolve(self, models: Sequence[Model], names: Sequence[str] = ()) -> PhaseResult:
        """Evolve networks or folders into one, without blocking whoever waits."""
        return await asyncio.to_thread(self.run, models, names)

    def run(self, models: Sequence[Model], names: Sequence[str] = ()) -> PhaseResult:
        """The same, at once."""
        began, around = time.monotonic(), self.config.around
        device = self.config.target_device
        folder = self._checkpoint or Path(around.output_dir)
        refuse_place(folder, [])  # before networks are written there
        refs = [self._on_disk(model, folder / f"{GIVEN}{i + 1}") for i, model in enumerate(models)]
        settings = self.config.evolution
        if not around.enable_parallel:
            settings = settings.model_copy(update={"workers": 1})
        job = Job.of(settings, refs, around.base, around.seed, folder, names=tuple(names))
        mirror = self._mirror(folder) if around.wandb_project else None
        try:
            done = evolve(job, device=device, listen=lambda record: self._tell(record, mirror))
        finally:
            if mirror is not None:
                mirror.end()
                mirror.close()
        return result_of(done, time.monotonic() - began)

    def _tell(self, record: Mapping[str, Any], mirror: WandbSink | None) -> None:
        if record["event"] != "generation":
            return
        best, diversity = record["best"], record["diversity"]
        if mirror is not None:
            values = {"best_fitness": best, "avg_fitness": record["mean"], "diversity": diversity}
            mirror.log("evomerge", record["generation"], values)
        for told in self._callbacks:
            told(record["generation"], best, diversity)

    def _mirror(self, folder: Path) -> WandbSink:
        sink = WandbSink(
            folder,
            group=folder.name,
            project=self.config.around.wandb_project,
            offline=True,
            config=self.config.evolution.model_dump(mode="json"),
            patience_s=WANDB_PATIENCE_S,
        )
        sink.begin("evomerge")
        return sink

    def _on_disk(self, model: Model, folder: Path) -> str:
        """The folder of a model; a network in memory gets one, with the tokenizer of its own."""
        if not isinstance(model, nn.Module):
            return str(model)
        known = getattr(model, "folder", None) or getattr(model, "name_or_path", None)
        home = Path(self.config.around.tokenizer or known or "")
        if not (known or self.config.around.tokenizer) or not home.is_dir():
            raise ConfigError(
                "a network in memory does not say where its tokenizer is",
                hint="give EvoMergeConfig(tokenizer=FOLDER), or the model as a folder",
            )
        state = dict(model.state_dict())
        if isinstance(model, ForgeNetwork):
            config = config_dict(model.settings)
        else:
            config = model.config.to_diff_dict()  # type: ignore[union-attr,operator]
            config["architectures"] = [type(model).__name__]
            if config.get("tie_word_embeddings"):
                state.pop("lm_head.weight", None)
        weights = from_memory(state)
        weights.config, weights.folder = config, home
        write(weights, folder, force=True)
        return str(folder)


def result_of(done: Evolved, seconds: float) -> PhaseResult:
    """What came out, as every phase says it."""
    artifacts = {
        "evolution_log": str(done.folder / "evolution_log.json"),
        "final_checkpoint": str(done.model_path),
        "best_generation": done.figures["best_generation"],
        "verdict": done.conclusion.to_json() if done.conclusion else None,
    }
    model = open_model(done.model_path).network
    return PhaseResult(True, model, "evomerge", done.figures, artifacts, seconds)
