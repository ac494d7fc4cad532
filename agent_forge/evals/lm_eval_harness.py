"""Tasks of lm-evaluation-harness by name; the library comes with the extra `eval`.

A model is opened as everywhere here, and handed over as an ordinary model of transformers.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_forge.errors import ConfigError, HostileInput

PREFIX = "lm-eval:"
OWN = "lm-eval"
# What a task that somebody wrote may say, field by field ("": a text whose templates name fields
# alone). The library would run functions, templates, code of metrics, datasets and prompts.
MAY_SAY = json.loads(Path(__file__).with_name("lm_eval_task.json").read_text(encoding="utf-8"))
FREE = ("metadata", "data_files")  # any field may stand in these
SCORES = ("acc", "exact_match", "pass@1")  # shares of right answers


def measure(
    model: Path,
    names: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """A row with all scores for every task; `lm-eval` in the data folder may have more, as YAML."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        problem = f"tasks of lm-eval need the library lm-eval ({error})"
        raise ConfigError(problem, hint="pip install 'agent-forge[eval]'") from None

    own = folder / OWN if folder else None
    for path in sorted(own.rglob("*.y*ml")) if own else ():
        try:
            code = next(_code(yaml.safe_load(path.read_bytes())), None)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            code = str(error)
        if code is not None:
            hint = "tasks with code of their own belong into an installed package"
            raise HostileInput(f"{path} says {code!r}: lm-eval runs code of tasks", hint=hint)
    there = str(own.resolve()) if own and own.is_dir() else None
    manager = TaskManager(include_path=there)
    theirs = TaskManager(include_path=there, include_defaults=False) if there else None
    if theirs and (twice := {*theirs.all_tasks} & {*TaskManager().all_tasks}):
        hint = "give the task another name: its score would pass for that of the library's"
        raise ConfigError(f"{own} has a task called {min(twice)}, as lm-eval has", hint=hint)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(f"lm-eval has no task {name!r}", hint="lm-eval ls tasks lists them")
    network, tokenizer = _as_transformers(model)
    wrapped = HFLM(pretrained=network, tokenizer=tokenizer, device="cpu", batch_size=1)
    how = {"num_fewshot": shots, "limit": limit, "bootstrap_iters": 0, "log_samples": False}
    # The library runs git and pip, and takes modules, metrics and datasets, where it is started.
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        found = simple_evaluate(model=wrapped, tasks=list(names), task_manager=manager, **how)
    table, counts = [], found["n-samples"]
    for name, scores in found["results"].items():
        # The library names a score with its filter, as in `acc,none`.
        numbers = {k: v for k, v in scores.items() if isinstance(v, int | float)}
        first = next((numbers[k] for s in SCORES for k in numbers if k.split(",")[0] == s), None)
        row = {"domain": f"{PREFIX}{name}", "items": counts.get(name, {}).get("effective")}
        table.append({**row, "accuracy": first, "scores": numbers})
    return table


def _code(said: Any, field: str = "") -> Iterator[str]:
    """What a task says that could be code."""
    entries = [(field, entry) for entry in said] if isinstance(said, list) else []
    for name, value in said.items() if isinstance(said, dict) else entries:
        if name not in MAY_SAY and field not in FREE:
            yield str(name)
        yield from _code(value, field if field in FREE else name)
    if isinstance(said, str) and not re.fullmatch(MAY_SAY.get(field) or MAY_SAY[""], said):
        yield said


def _as_transformers(model: Path) -> tuple[Any, Any]:
    """A network and a tokenizer of transformers; ours in its class there."""
    from agent_forge.model.folder import home_of
    from agent_forge.model.hf import ForgeConfig, ForgeForCausalLM, config_dict
    from agent_forge.model.load import open_tokenizer
    from agent_forge.model.opened import TransformersModel, open_model

    opened: Any = open_model(model)
    if isinstance(opened, TransformersModel):
        return opened.network, opened.tokenizer
    wrapped = ForgeForCausalLM(ForgeConfig(**config_dict(opened.network.settings))).eval()
    wrapped.network.load_state_dict(opened.network.state_dict())
    return wrapped, open_tokenizer(home_of(model))
