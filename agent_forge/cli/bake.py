"""`forge bake`: a prompt becomes a part of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer

from agent_forge.cli.merge import whole_or_nothing
from agent_forge.cli.output import emit, emit_json, emit_table
from agent_forge.errors import ConfigError
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.phases.phase6_baking.bake_prompt import BakedModel

DIRECTIONS = ("forward", "reverse")


def bake(
    model: Path,
    out: Path,
    prompt: Path,
    questions: Path | None,
    direction: str,
    steps: int,
    rate: float,
    strength: float,
    lora_rank: int,
    seed: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bake a prompt into a model: it then answers without it as it did with it."""
    if direction not in DIRECTIONS:
        raise ConfigError(f"--direction {direction} is neither forward nor reverse")
    from agent_forge.model.locate import locate_model
    from agent_forge.phases.phase6_baking.bake_prompt import BakeRequest, bake_prompt, check
    from agent_forge.train.bake import BakeSettings

    settings = BakeSettings(
        cast(Literal["forward", "reverse"], direction),
        lora_rank=lora_rank,
        steps=steps,
        rate=rate,
        strength=strength,
        seed=seed,
    )
    request = BakeRequest(locate_model(model), prompt, out, questions, settings)
    with whole_or_nothing(out):
        if dry_run:
            facts = {"model": str(model), **check(request, force).facts(), "steps": steps}
            return emit(as_json, ("", ""), [*facts.items()], **facts)
        with make_progress("none" if as_json else "auto") as view:

            def progress(what: str, done: int, total: int) -> None:
                view({"event": "step", "phase": what, "step": done, "total": total})

            view({"event": "loop", "name": "bake", "first": 0, "total": steps})
            result = bake_prompt(request, force=force, progress=progress)
    _report(result, as_json)


def _report(result: BakedModel, as_json: bool) -> None:
    from agent_forge.phases.phase6_baking.bake_prompt import table_of

    verdict = result.verdict.to_json()
    if as_json:
        about = {"folder": str(result.folder), "prompt": result.place}
        return emit_json(**about, **verdict, cpu_seconds=round(result.cpu_seconds, 1))
    numbers = ((name, f"{before:.4f}", f"{after:.4f}") for name, before, after in table_of(verdict))
    emit_table(("", "before", "after"), list(numbers))
    print(result.folder)
    told = f"the prompt was given {result.place}; {result.cpu_seconds:.0f} CPU seconds"
    typer.echo(f"{result.verdict.sentence}; {told}", err=True)
