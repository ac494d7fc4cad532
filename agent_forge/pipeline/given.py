"""Networks in memory that a phase is given: saved, so that they can be found when it goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_forge.config.phases import source_of
from agent_forge.contract.handoff import RULES
from agent_forge.contract.phase import ModelRef, Network
from agent_forge.errors import ConfigError
from agent_forge.store.records import learned_record, read_metadata

if TYPE_CHECKING:
    from agent_forge.data.tokenizer import Tokenizer
    from agent_forge.model.network import ForgeNetwork
    from agent_forge.pipeline.orchestrator import PipelineOrchestrator

log = logging.getLogger(__name__)


def save_inputs(
    run: PipelineOrchestrator, phase: str, models: Sequence[ModelRef | Network]
) -> list[ModelRef]:
    """The models that a phase is given, each on disk; networks in a session of their own. What
    cannot be given is refused before there is one."""
    source = source_of(phase)
    if source is None:
        raise ConfigError(f"{phase} begins from nothing: it takes no models")
    if len(models) != (count := RULES[source, phase].num_models):
        raise ConfigError(f"{phase} takes {count} models, got {len(models)}")
    for model in models:
        if not isinstance(model, ModelRef):
            _refuse_others(model)
    session, found = run.sessions.create({}, "").name, list[ModelRef]()
    for number, model in enumerate(models, start=1):
        if not isinstance(model, ModelRef):
            model = _saved(run, session, source, f"given_{number}", model)
        found.append(model)
    run.sessions.set_status(session, "completed")
    return found


def _refuse_others(network: Any) -> None:
    from agent_forge.model.network import ForgeNetwork

    if not isinstance(network, ForgeNetwork):
        hint = "save it with its tokenizer, and name the folder"
        raise ConfigError(f"a network in memory is one of ours, not {type(network)}", hint=hint)
    if network.packing:
        raise ConfigError("a packed network is given by its folder: it computes otherwise")


def _saved(
    run: PipelineOrchestrator, session: str, source: str, name: str, network: Any
) -> ModelRef:
    learned = learned_record(network.folder) if network.folder else {}
    model_id = run.storage.save_model(
        network,
        session,
        source,
        name,
        learned,
        tokenizer_files=_tokenizer_of(run, network).files(),
    )
    path = run.storage.find(model_id)
    return ModelRef(name, path, read_metadata(path).model_dump())


def _tokenizer_of(run: PipelineOrchestrator, network: ForgeNetwork) -> Tokenizer:
    """That of the folder that a network comes from, or else the one that Phase 1 would make."""
    from agent_forge.model.opened import open_model
    from agent_forge.train.corpus import build_corpus

    if network.folder is None:
        log.warning("a network without a folder gets the tokenizer of this config's first phase")
        return build_corpus(run.config.phases.cognate, network.settings).tokenizer
    found: Tokenizer = open_model(network.folder).tokenizer
    return found
