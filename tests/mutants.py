"""Break the code on purpose, one named line at a time: each break must turn a test red.

    python tests/mutants.py [NAME ...]

Works on a copy, so the checkout is never touched. Exits 1 if a mutant survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    name: str
    file: str
    line: str
    broken: str
    test: str

    def apply(self, source: str) -> str:
        """The source of `file` with the line broken; the line must occur exactly once."""
        times = source.count(self.line)
        if times != 1:
            raise ValueError(f"{self.name}: its line is in {self.file} {times} times, not once")
        return source.replace(self.line, self.broken)


MUTANTS = (
    Mutant(
        "a write is not synced before its rename",
        "store/files.py",
        "        disk.sync(writer.fd)  # of a new file\n",
        "        pass\n",
        "tests/store/test_files.py",
    ),
    Mutant(
        "a replaced directory is not finished after a crash",
        "store/files.py",
        "            if name.startswith(READY):\n                finish_replace(",
        "            if name.startswith(READY):\n                (lambda path: None)(",
        "tests/store/test_files.py",
    ),
    Mutant(
        "a flipped bit goes unnoticed",
        "store/files.py",
        'if found != record["sha256"]:',
        "if False:",
        "tests/store/test_checkpoint.py",
    ),
    Mutant(
        "a forked child keeps its parent's lock alive",
        "store/lock.py",
        "platform.after_fork(_forget_after_fork)",
        "",
        "tests/store/test_lock.py",
    ),
    Mutant(
        "the registry upgrades a read to a write",
        "store/registry.py",
        'connection.execute("BEGIN IMMEDIATE")',
        'connection.execute("BEGIN DEFERRED")',
        "tests/faults/test_processes.py",
    ),
    Mutant(
        "the generators are not restored",
        "contract/phase.py",
        "        restore_generators(generators, given)\n",
        "",
        "tests/faults/test_runs.py",
    ),
    Mutant(
        "metrics of a lost step are not taken back",
        "contract/phase.py",
        "self._kept = self.tracker.metrics.keep(self.phase, sure)",
        "self._kept = sure",
        "tests/faults/test_runs.py",
    ),
    Mutant(
        "NaN is logged as if it were a number",
        "contract/phase.py",
        "if not math.isfinite(value):",
        "if False:",
        "tests/faults/test_runs.py",
    ),
    Mutant(
        "a missed gate lets the model pass",
        "contract/handoff.py",
        "return value >= threshold if self.name.startswith",
        "return True if self.name.startswith",
        "tests/contract/test_contract.py",
    ),
    Mutant(
        "a phase is skipped whatever its inputs were",
        "pipeline/phase_run.py",
        'state["fingerprint"] == fingerprint and state["status"] == "completed"',
        'state["status"] == "completed"',
        "tests/pipeline/test_orchestrator.py",
    ),
    Mutant(
        "a hanging W&B holds the run up",
        "track/wandb_sink.py",
        "if time.monotonic() - min(began, self._busy_since) > patience_s:",
        "if time.monotonic() - min(began, self._busy_since) > 20:",
        "tests/track/test_track.py",
    ),
    Mutant(
        "a model's claim of its size is believed",
        "contract/handoff.py",
        '{**r, "parameters": _count(w)}',
        '{"parameters": _count(w), **r}',
        "tests/contract/test_contract.py",
    ),
    Mutant(
        "a token sees the future",
        "model/attention.py",
        "(key <= query) & (key > query - self.window)",
        "(key <= query + 1) & (key > query - self.window)",
        "tests/model/test_network.py",
    ),
    Mutant(
        "a stop request is not heard",
        "contract/phase.py",
        "            if self.should_stop():\n",
        "            if False:\n",
        "tests/faults/test_runs.py",
    ),
    Mutant(
        "DARE masks depend on the run that asks",
        "merge/tensor_inputs.py",
        "np.random.Philox(key=_mask_key(seed, name), counter=step)",
        "np.random.Philox(key=_mask_key(seed, name), counter=0)",
        "tests/merge/test_methods.py",
    ),
    Mutant(
        "TIES does not elect a sign",
        "merge/methods.py",
        "sign = torch.copysign(torch.ones((), dtype=total.dtype), total)",
        "sign = torch.ones_like(total)",
        "tests/merge/test_parity.py",
    ),
    Mutant(
        "a parent that has changed is merged all the same",
        "merge/output.py",
        "if ref in found and found[ref] != value:",
        "if False:",
        "tests/merge/test_engine.py",
    ),
    Mutant(
        "a merge with NaN is written",
        "merge/engine.py",
        "if not bool(flat.isfinite().all()):",
        "if False:",
        "tests/faults/test_merge.py",
    ),
    Mutant(
        "equal scores go to whoever was told first",
        "search/base.py",
        "(-self.scores[k], self._origins[k].generation, k)",
        "-self.scores[k]",
        "tests/search/test_evolution.py",
    ),
    Mutant(
        "a failed candidate becomes elite",
        "search/base.py",
        "if self.scores.get(key, -math.inf) > -math.inf]",
        "if key in self.scores]",
        "tests/search/test_evolution.py",
    ),
    Mutant(
        "a resumed evolution forgets which candidates failed",
        "phases/phase2_evomerge/loop.py",
        "fitness = -math.inf if score is None else self._fitness(candidate, score)",
        "fitness = 0.0 if score is None else self._fitness(candidate, score)",
        "tests/phases/phase2_evomerge/test_evolution.py",
    ),
    Mutant(
        "another answer to a prompt may be in another part",
        "evals/domains.py",
        "return [_part_at(split_hash(e, self.split_by, self.exact)) for",
        "return [_part_at(content_hash(e)) for",
        "tests/phases/phase2_evomerge/test_splits.py",
    ),
    Mutant(
        "an old evolution goes on with other items",
        "phases/phase2_evomerge/inputs.py",
        'begun = {**EvoMergeSettings.BEFORE, **record["settings"]}',
        'begun = {"split_by": "asked", **record["settings"]}',
        "tests/phases/phase2_evomerge/test_splits.py",
    ),
    Mutant(
        "a p is corrected for itself alone",
        "evals/comparison.py",
        "min(1.0, (len(p_values) - rank) * p_values[i])",
        "p_values[i]",
        "tests/evals/test_comparison.py",
    ),
    Mutant(
        "the uncorrected p decides",
        "evals/comparison.py",
        "return self.p if self.p_holm is None else self.p_holm",
        "return self.p",
        "tests/evals/test_comparison.py",
    ),
    Mutant(
        "an ensemble adds probabilities instead of averaging them",
        "evals/ensemble.py",
        "math.log(self.models)",
        "0.0",
        "tests/evals/test_ensemble.py",
    ),
    Mutant(
        "workers count what this process leaves out",
        "phases/phase2_evomerge/evaluator.py",
        '"floor": floor}',
        '"floor": None}',
        "tests/phases/phase2_evomerge/test_champion.py",
    ),
    Mutant(
        "parents keep the fitness from before the floor",
        "phases/phase2_evomerge/loop.py",
        "if not self.floor or not self.search.is_reference(candidate.key):",
        "if True:",
        "tests/phases/phase2_evomerge/test_champion.py",
    ),
    Mutant(
        "the search chooses the champion",
        "phases/phase2_evomerge/loop.py",
        "max(finalists, key=lambda key: scores[key], default=None)",
        "finalists[0]",
        "tests/phases/phase2_evomerge/test_champion.py",
    ),
    Mutant(
        "an old evolution goes on under new rules",
        "phases/phase2_evomerge/loop.py",
        'if first.get("rules") == RULES["rules"]:',
        "if first is not None:",
        "tests/phases/phase2_evomerge/test_champion.py",
    ),
    Mutant(
        "a search with another seed is forgotten",
        "phases/phase2_evomerge/evolution.py",
        "replace(inputs, settings=alone, seed=seed, folder=folder, branch=None)",
        "replace(inputs, settings=alone, folder=folder, branch=None)",
        "tests/phases/phase2_evomerge/test_champion.py",
    ),
    Mutant(
        "a request may pass the cost cap",
        "data/endpoint_cost.py",
        "if self.usd + worst_usd > self.cap_usd:",
        "if self.usd > self.cap_usd:",
        "tests/data/test_endpoint_rows.py",
    ),
    Mutant(
        "a request under way is not on the disk",
        "data/endpoint_rows.py",
        "    journal.sync()\n",
        "",
        "tests/data/test_endpoint_rows.py",
    ),
    Mutant(
        "what earlier runs spent is forgotten",
        "data/endpoint_rows.py",
        "        endpoint.spending.carry(spent_usd(records))\n",
        "",
        "tests/data/test_endpoint_rows.py",
    ),
    Mutant(
        "the key is sent over plain http",
        "data/endpoint_http.py",
        "if key and not (self._is_tls or self.is_local):",
        "if False:",
        "tests/data/test_endpoint.py",
    ),
    Mutant(
        "a trickle holds a request up for ever",
        "data/endpoint_http.py",
        "    timer.start()\n",
        "",
        "tests/data/test_endpoint.py",
    ),
    Mutant(
        "a thought with a wrong claim is learned",
        "data/traces.py",
        "    elif steady(trace) != steady(write_trace(task, trace.strategy, Random(0))):\n",
        "    elif False:\n",
        "tests/data/test_traces.py",
    ),
    Mutant(
        "items that models are measured on are taught",
        "data/traces.py",
        'return tasks.make(family, "train", self.number, seed=self.seed, level=level)',
        'return tasks.make(family, "verdict", self.number, seed=self.seed, level=level)',
        "tests/data/test_traces.py",
    ),
    Mutant(
        "tokens of thinking leak into answers",
        "infer/generate.py",
        "in {row.sampling.banned_tokens for row in self.live} - {frozenset()}:\n",
        "in ():\n",
        "tests/infer/test_thinking.py",
    ),
    Mutant(
        "thoughts are never called theatre",
        "evals/thoughts.py",
        "        return bool(self.reasons)\n",
        "        return False\n",
        "tests/evals/test_thoughts.py",
    ),
    Mutant(
        "a reward is its own advantage",
        "train/rewards.py",
        "return rewards_QS - rewards_QS.mean(1, keepdim=True)",
        "return rewards_QS",
        "tests/train/test_rewards.py",
    ),
    Mutant(
        "a failed check of rewards changes no weights",
        "phases/phase3_quietstar/reward_step.py",
        "            self.trainer.model.load_state_dict(self._good)\n",
        "",
        "tests/phases/phase3_quietstar/test_reward_step.py",
    ),
    Mutant(
        "the scale of a ternary row is the mean of all its weights",
        "quant/codecs.py",
        "        if self.least_squares:\n            mean =",
        "        if False:\n            mean =",
        "tests/quant/test_codecs.py",
    ),
    Mutant(
        "a packed model computes with inputs as they are",
        "model/opened.py",
        "        round_inputs(network, packing.with_rounded_inputs)\n",
        "        pass\n",
        "tests/quant/test_packed.py",
    ),
    Mutant(
        "scales of a packed file may be anything",
        "quant/codecs.py",
        "        if not bool(written.isfinite().all()):\n",
        "        if False:\n",
        "tests/quant/test_packed.py",
    ),
    Mutant(
        "rounding stops the gradient",
        "quant/layers.py",
        "        return changed + (weight - weight.detach())\n",
        "        return changed\n",
        "tests/quant/test_layers.py",
    ),
    Mutant(
        "a kind of matrix that costs too much stays ternary",
        "phases/phase4_bitnet/rounding.py",
        "{**packing.matrices, **changed}",
        "packing.matrices",
        "tests/phases/phase4_bitnet/test_bitnet.py",
    ),
    Mutant(
        "texts that share passages are searched and judged by",
        "evals/domains.py",
        "own = [len(taken & next(found)) < ENOUGH for _ in domain.examples]",
        "own = [len(taken & next(found)) >= 0 for _ in domain.examples]",
        "tests/faults/test_attack_overlap.py",
    ),
    Mutant(
        "what the verdict answers at length is searched by",
        "evals/domains.py",
        "            found += long_answers(domain.examples)\n",
        "            pass\n",
        "tests/faults/test_attack_overlap.py",
    ),
    Mutant(
        "answers are graded with the thought before them",
        "model/opened.py",
        "return self.decode(behind_thought(ids, within=within))",
        "return self.decode(ids)",
        "tests/evals/test_thoughts.py",
    ),
    Mutant(
        "thoughts on which two cuts differ are learned",
        "phases/phase5_forge/own_thoughts.py",
        "agreed = [one if one == two else None for",
        "agreed = [one for",
        "tests/phases/phase5_forge/test_own_thoughts.py",
    ),
    Mutant(
        "worked examples of sizes beyond the edge are taught",
        "phases/phase5_forge/rounds.py",
        "self.worked_to.get(name, family.taught[1])",
        "family.sizes[-1]",
        "tests/phases/phase5_forge/test_forge.py",
    ),
    Mutant(
        "a round that costs too much is kept",
        "phases/phase5_forge/rounds.py",
        "            return model, Round(number, families, reason)\n        self.pools",
        "            return child, Round(number, families, reason)\n        self.pools",
        "tests/phases/phase5_forge/test_forge.py",
    ),
    Mutant(
        "a thought that the template opened is graded",
        "evals/model_under_test.py",
        "                text.text = decode(text.tokens, within=True)\n",
        "                pass\n",
        "tests/evals/test_thoughts.py",
    ),
    Mutant(
        "near-copies are many items in a verdict",
        "evals/comparison.py",
        "    if len(set(questions)) == len(questions):\n",
        "    if True:\n",
        "tests/faults/test_attack_overlap.py",
    ),
)


def passes(test: str, copy: Path) -> bool:
    """True if the tests pass; a run that neither passes nor fails ends everything."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not soak", test]
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # what the tests start sees it too
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    code = ended.returncode
    if code not in (0, 1):
        raise SystemExit(f"{test}: pytest ended with {code}")
    return code == 0


def survives(mutant: Mutant, copy: Path) -> bool:
    """True if all tests still pass with the line broken."""
    path = copy / "agent_forge" / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(source), encoding="utf-8")
    try:
        return passes(mutant.test, copy)
    finally:
        path.write_text(source, encoding="utf-8")


def main(names: list[str]) -> int:
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise SystemExit(f"no mutant is named {sorted(unknown)}")
    chosen = [m for m in MUTANTS if not names or m.name in names]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignore = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", "storage")
        shutil.copytree(ROOT, copy, ignore=ignore)
        for test in sorted({mutant.test for mutant in chosen}):
            if not passes(test, copy):
                raise SystemExit(f"{test} fails without any mutant")
        for mutant in chosen:
            began = time.monotonic()
            lives = survives(mutant, copy)
            alive += [mutant.name] * lives
            verdict = "SURVIVED" if lives else "killed"
            sys.stdout.write(f"{verdict:9}{time.monotonic() - began:5.1f} s  {mutant.name}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(alive)} passed, {len(alive)} failed\n")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
