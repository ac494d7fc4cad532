"""PipelineConfig: the shared sections and the settings of all eight phases. Torch-free."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from agent_forge.config import settings as shared
from agent_forge.config.load import PHASE_FOLDER, PIPELINE_FILE, did_you_mean, load, to_yaml
from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.contract.handoff import RULES
from agent_forge.phases.phase1_cognate.config import CognateSettings
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings, refuse_outside
from agent_forge.phases.phase3_quietstar.config import QuietStarSettings
from agent_forge.phases.phase4_bitnet.config import BitNetSettings
from agent_forge.phases.phase5_forge.config import ForgeSettings
from agent_forge.phases.phase6_baking.config import BakingSettings
from agent_forge.phases.phase7_edge.config import EdgeSettings
from agent_forge.phases.phase8_final_compression.config import FinalCompressionSettings
from agent_forge.phases.toy_config import ToySettings


class PhaseConfigs(shared.Settings):
    """The settings of each phase, in the order in which they run."""

    toy: ToySettings = ToySettings()
    cognate: CognateSettings = CognateSettings()
    evomerge: EvoMergeSettings = EvoMergeSettings()
    quietstar: QuietStarSettings = QuietStarSettings()
    bitnet: BitNetSettings = BitNetSettings()
    forge: ForgeSettings = ForgeSettings()
    baking: BakingSettings = BakingSettings()
    edge: EdgeSettings = EdgeSettings()
    final_compression: FinalCompressionSettings = FinalCompressionSettings()


EVOMERGE = "phases.evomerge."
# For the record of a run that was begun before there were these settings.
BEFORE = {"phases": {name: dict(settings.BEFORE) for name, settings in PhaseConfigs()}}


class PipelineConfig(shared.Settings):
    """Everything a run is told. The resolved config is saved with the run."""

    preset: str = Field("tiny", description="the preset that the rest was derived from")
    runtime: shared.RuntimeSettings = shared.RuntimeSettings()
    storage: shared.StorageSettings = shared.StorageSettings()
    tracking: shared.TrackingSettings = shared.TrackingSettings()
    cleanup_policy: shared.CleanupSettings = shared.CleanupSettings()
    model: shared.ModelSettings = shared.ModelSettings()
    phases: PhaseConfigs = PhaseConfigs()

    @model_validator(mode="after")
    def _gates_exist(self) -> Self:
        known = {target: [g.name for g in rule.gates] for (_, target), rule in RULES.items()}
        for phase in ORDER:
            settings, names = getattr(self.phases, phase), known.get(phase, [])
            if not names and (settings.gates or settings.gate_policy != "fail"):
                raise ValueError(f"phases.{phase} has no quality gates at its entrance")
            for gate in settings.gates:
                if gate not in names:
                    raise ValueError(f"phases.{phase}.gates: {gate!r}{did_you_mean(gate, names)}")
        return self


def load_config(
    *, preset: str | None = None, path: Path | None = None, sets: tuple[str, ...] = ()
) -> PipelineConfig:
    """The pipeline's config from a preset, a file or folder, and `--set` items."""
    config = load(PipelineConfig, preset=preset, path=path, sets=sets)
    if path is not None:
        refuse_outside(config.phases.evomerge.model_dump(), str(path), sets, EVOMERGE)
    return config


def config_folder(config: PipelineConfig) -> dict[str, str]:
    """The files of a config folder that reads back to this config: relative path -> text."""
    text = to_yaml(config)
    folder = {PIPELINE_FILE: text[: text.index("\nphases:")] + "\n"}
    for name in ORDER:
        folder[f"{PHASE_FOLDER}/{phase_folder(name)}.yaml"] = to_yaml(getattr(config.phases, name))
    return folder
