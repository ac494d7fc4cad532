"""Networks in memory that a phase is given: saved in its session, where the phase before would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent_forge.config.phases import source_of
from agent_forge.contract.phase import ModelRef, Network
from agent_forge.errors import ConfigError
from agent_forge.pipeline.config import PipelineConfig
from agent_forge.pipeline.phase_run import RunContext
from agent_forge.store.records import read_metadata

if TYPE_CHECKING:
    from agent_forge.data.tokenizer import Tokenizer
    from agent_forge.model.network import ForgeNetwork


def on_disk(run: RunContext, phase: str, models: Sequence[ModelRef | Network]) -> list[ModelRef]:
    """The models that a phase is given, each on disk."""
    source = source_of(phase)
    if source is None and models:
        raise ConfigError(f"{phase} begins from nothing: it takes no models")
    found = []
    for number, model in enumerate(models, start=1):
        if not isinstance(model, ModelRef):
            assert source is not None
            model = _saved(run, source, f"given_{number}", model)
        found.append(model)
    return found


def _saved(run: RunContext, source: str, name: str, network: Network) -> ModelRef:
    from agent_forge.model.hf import config_dict
    from agent_forge.model.network import ForgeNetwork

    if not isinstance(network, ForgeNetwork):
        hint = "save it with its tokenizer, and name the folder"
        raise ConfigError(f"a network in memory is one of ours, not {type(network)}", hint=hint)
    model_id = run.storage.save_model(
        network,
        run.folder.name,
        source,
        name,
        {},
        config=config_dict(network.settings),
        tokenizer_files=_tokenizer_of(network, run.config).files(),
    )
    path = run.storage.find(model_id)
    return ModelRef(name, path, read_metadata(path).model_dump())


def _tokenizer_of(network: ForgeNetwork, config: PipelineConfig) -> Tokenizer:
    """That of the folder that a network comes from, or else the one that Phase 1 would make."""
    from agent_forge.model.opened import open_model
    from agent_forge.train.corpus import build_corpus

    if network.folder is None:
        return build_corpus(config.phases.cognate, network.settings).tokenizer
    found: Tokenizer = open_model(network.folder).tokenizer
    return found
