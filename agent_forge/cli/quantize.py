"""`forge quantize`: a model in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agent_forge.cli.merge import whole_or_nothing
from agent_forge.cli.output import emit, emit_json, emit_table, size
from agent_forge.errors import ConfigError
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.phases.quantise import Quantised

ACTIVATION_BITS = (0, 8)
MOST_CODED = 0.8  # of the weights: below it is said


def quantize(
    model: Path,
    out: Path,
    codec: str,
    embedding: str,
    activation_bits: int,
    data: list[Path],
    steps: int,
    rate: float,
    seed: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a model in few bits; with --data and --steps it is trained through the rounding."""
    if activation_bits not in ACTIVATION_BITS:
        raise ConfigError(f"--activation-bits {activation_bits} is neither 0 nor 8")
    from agent_forge.model.locate import locate_model
    from agent_forge.phases.quantise import QuantiseRequest, check, quantise
    from agent_forge.quant.codecs import find_codec

    for name in [codec] if embedding == "fp16" else [codec, embedding]:
        find_codec(name)
    place, how = locate_model(model), (codec, embedding, activation_bits)
    request = QuantiseRequest(place, out, data, steps, rate, seed, *how)
    with whole_or_nothing(out):
        if dry_run:
            weights = check(request, force)
            facts = {"model": str(model), "weights": weights.parameters, "bytes": weights.nbytes}
            facts |= {"memory_bytes": weights.parameters * 4 * (6 if steps else 2)}
            return emit(as_json, ("", ""), [*facts.items()], **facts)
        with make_progress("none" if as_json else "auto") as view:

            def progress(what: str, done: int, total: int) -> None:
                view({"event": "step", "phase": what, "step": done, "total": total})

            view({"event": "loop", "name": "quantize", "first": 0, "total": steps})
            result = quantise(request, force=force, progress=progress)
    _report(result, as_json)


def _report(result: Quantised, as_json: bool) -> None:
    sizes: dict[str, float] = {"original_bytes": result.original_bytes}
    sizes |= {"packed_bytes": result.packed_bytes, "coded_share": result.coded_share}
    if as_json:
        found = result.comparison.to_json() if result.comparison else None
        about = {"folder": str(result.folder), "sentence": result.sentence, "comparison": found}
        return emit_json(**about, **sizes)
    if result.comparison:
        from agent_forge.evals.comparison import COLUMNS

        emit_table(COLUMNS, result.comparison.rows())
    print(result.folder)
    shrunk = f"{size(result.original_bytes)} of weights became {size(result.packed_bytes)}"
    if result.coded_share < MOST_CODED:
        shrunk += f" (only {result.coded_share:.0%} of them have a codec, the rest is fp16)"
    typer.echo(f"{shrunk}; {result.sentence}", err=True)
