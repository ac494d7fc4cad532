"""`forge compress`: a model in one small file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agent_forge.cli.merge import whole_or_nothing
from agent_forge.cli.output import emit, emit_json, emit_table, size
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.phases.compress import Compressed


def compress(
    model: Path,
    out: Path,
    ratio: float | None,
    retention: float | None,
    data: list[Path],
    steps: int,
    rate: float,
    seed: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write a model into one small file that every command opens, by size or by what is kept.

    What is kept (--retention) is the share of the accuracy on questions of --data, if the model
    answers 5 % of them at least; else e^-d, where d is how much more a token costs, in nats.
    """
    from agent_forge.model.locate import locate_model
    from agent_forge.phases.compress import Compression, CompressRequest

    learning = (data, steps, rate, seed)
    request = CompressRequest(locate_model(model), out, *learning, ratio, retention)
    with whole_or_nothing(out):
        compression = Compression(request, force=force)
        if dry_run:
            facts = {**compression.facts(), "model": str(model)}
            return emit(as_json, ("", ""), [*facts.items()], **facts)
        with make_progress("none" if as_json else "auto") as view:

            def progress(what: str, done: int, total: int) -> None:
                view({"event": "step", "phase": what, "step": done, "total": total})

            view({"event": "loop", "name": "compress", "first": 0, "total": steps})
            result = compression.run(force=force, progress=progress)
    _report(result, as_json)


def _report(result: Compressed, as_json: bool) -> None:
    numbers = result.numbers()
    if as_json:
        about = {"file": str(result.file), "sentence": result.sentence}
        return emit_json(**about, comparison=result.comparison.to_json(), **numbers)
    from agent_forge.evals.comparison import COLUMNS

    emit_table(COLUMNS, result.comparison.rows())
    print(result.file)
    shrunk = f"{size(result.fp32_bytes)} in fp32 became {size(result.file_bytes)}"
    ratios = f"{result.ratio:.2f} times smaller without the tokenizer"
    ratios += f" ({numbers['ratio_with_tokenizer']:.2f} with it)"
    bits = f"{numbers['bits_per_weight']:.2f} bits a weight"
    kept = "" if result.retention is None else f", {result.retention:.1%} kept"
    typer.echo(f"{shrunk}: {ratios}, {bits}{kept}; {result.sentence}", err=True)
