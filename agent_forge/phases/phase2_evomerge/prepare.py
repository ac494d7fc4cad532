"""From the references of an evolution to open models, a network to put them into, and a fitness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.evals.domains import Domain
from agent_forge.evals.model_under_test import ModelUnderTest, model_under_test
from agent_forge.merge.output import write
from agent_forge.model.folder import MODEL_TYPE, open_weights
from agent_forge.model.load import load_network, own_name
from agent_forge.model.opened import with_tokenizer
from agent_forge.model.weights import Weights, from_memory, with_same_heads
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evaluator import Material
from agent_forge.phases.phase2_evomerge.evomerge import Inputs
from agent_forge.phases.phase2_evomerge.fitness import (
    CommandFitness,
    DomainFitness,
    Fitness,
    FunctionFitness,
    is_function,
)


def open_parents(refs: Sequence[str], base_ref: str | None) -> tuple[list[Weights], Weights | None]:
    """The weights of all parents and of the base; if one has a head of its own, all have one."""
    models = [open_weights(ref) for ref in (*refs, *([base_ref] if base_ref else []))]
    models = with_same_heads(models)
    return models[: len(refs)], models[-1] if base_ref else None


def prepare(settings: EvoMergeSettings, inputs: Inputs, device: str, folder: Path) -> Material:
    """Open the models and get ready to measure."""
    parents, base = open_parents(inputs.parents, inputs.base)
    for weights in (*parents, *([base] if base else [])):
        _refuse_damaged(weights)
    subject = _subject(parents[0])
    subject.model.to(device)
    fitness: Fitness
    sign = 1 if settings.fitness_direction == "maximize" else -1
    if is_function(settings.fitness):
        fitness = FunctionFitness(settings.fitness, subject.model, sign)
    elif settings.fitness:
        fitness = CommandFitness(settings.fitness, _writer(subject, parents[0], folder), sign)
    else:
        fitness = _on(settings, subject, inputs.splits["selection"])
    holdout = None
    if "holdout" in inputs.splits and not settings.fitness:
        holdout = _on(settings, subject, inputs.splits["holdout"])
    hashes = tuple(w.sha256() for w in (*parents, *([base] if base else [])))
    return Material(parents, base, subject, fitness, holdout, hashes)


def _on(
    settings: EvoMergeSettings, subject: ModelUnderTest, domains: Sequence[Domain]
) -> DomainFitness:
    how = settings.fitness_weights, settings.fitness_floors, settings.domain_weights
    return DomainFitness(subject, domains, *how, settings.mixed_precision, settings.racing)


def _refuse_damaged(weights: Weights) -> None:
    for name in weights:
        tensor = weights[name]
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DamagedFile(weights.label, f"{name} holds NaN or infinity", hint="fetch it again")


def _subject(first: Weights) -> ModelUnderTest:
    """A network of the parents' shape, which every candidate is put into, and their tokenizer."""
    assert first.folder is not None and first.config  # resolve() looked
    model = load_network(first.config, {name: first[name] for name in first}, first.label)
    ours = first.config["model_type"] == MODEL_TYPE
    names = {own_name(name) if ours else name for name in first}
    if strange := sorted(names - set(model.state_dict())):
        raise ConfigError(
            f"{first.label}: transformers renames {strange[0]} when it loads it",
            hint="open and save it once with transformers (save_pretrained), and give that folder",
        )
    return model_under_test(with_tokenizer(model, first.folder))


def _writer(subject: ModelUnderTest, parent: Weights, folder: Path) -> Callable[[], Path]:
    """Writes what the network holds as a model directory, always to the same place."""

    def write_it() -> Path:
        target = folder / "candidate"
        state = {name: subject.model.state_dict()[name] for name in parent.specs}
        now = from_memory(state)
        now.config, now.folder = parent.config, parent.folder
        write(now, target, force=True)
        return target

    return write_it
