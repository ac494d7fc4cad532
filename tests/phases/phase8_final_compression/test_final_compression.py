"""Phase 8: files are as small as they say, points are kept or taken back, a kill costs nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_forge.contract.metrics import METRICS, find_metric
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import DamagedFile
from agent_forge.model.opened import open_model
from agent_forge.native.bundle import write_bundle
from agent_forge.phases.allocation import (
    Price,
    coded_bytes,
    divergence_of,
    prices_of,
    steps_for,
)
from agent_forge.phases.phase8_final_compression.points import Compression, pruned
from agent_forge.phases.skills import Skills
from agent_forge.phases.training import LatentModel
from agent_forge.quant.layers import plan_packing
from agent_forge.store.container import read_container, unpacked
from agent_forge.store.paths import USER_FOLDER
from agent_forge.store.records import learned_record, read_metadata
from tests.support.compression_runs import PHASE, as_if_able, made, run
from tests.support.networks import network
from tests.support.programs import built, by_torch
from tests.support.tokenizers import TOKENIZER
from tests.support.toy_runs import exit_code, folder, forked, metrics

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
BATCH = torch.randint(0, 500, (4, 24), generator=torch.Generator().manual_seed(1))
ASKED = torch.arange(24).expand(4, 24) >= torch.tensor([[5], [9], [1], [20]])


def model() -> LatentModel:
    own = network(ffn_hidden=96, n_heads=2, n_layers=2)
    return LatentModel(own.settings, own.state_dict(), None)


# -- mathematics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1.3, 2.0, 4.0])
def test_steps_make_the_size_that_is_asked_for(bits: float) -> None:
    latent = model()
    matrices = plan_packing(latent.whole(), "step1", "step1").matrices
    count = sum(latent.state[name].numel() for name in matrices)
    for prices in ([], [Price("embedding", 1000, 5.0), Price("blocks.mlp.up", 1000, 0.01)]):
        known = prices and prices_of(lambda state: float(len(state)), latent.state, matrices)
        chosen = steps_for(latent.state, matrices, known, count * bits / 8)
        assert list(chosen) == list(matrices)
        assert coded_bytes(latent.state, chosen) == pytest.approx(count * bits / 8, rel=0.01)


def test_what_costs_more_is_written_finer() -> None:
    latent = model()
    matrices = plan_packing(latent.whole(), "step1", "step1").matrices
    prices = prices_of(lambda s: 9.0 if "embedding.weight" in s else 0.5, latent.state, matrices)
    steps = {n: m.codec.step for n, m in steps_for(latent.state, matrices, prices, 9000).items()}  # type: ignore[attr-defined]
    assert steps["embedding.weight"] == min(steps.values()) < max(steps.values()) / 2


def test_allocation_lowers_the_divergence_at_the_same_size() -> None:
    latent = model()
    whole, matrices = latent.whole(), plan_packing(latent.whole(), "step1", "step1").matrices
    state = dict(whole.state_dict())
    state["blocks.0.mlp.down.weight"] *= 30  # what the answers depend on most
    whole.load_state_dict(state)

    def cost(changed: Any) -> float:
        return divergence_of(whole, changed, [(BATCH, ASKED)])

    prices = prices_of(cost, state, matrices)
    size = 3 * sum(state[n].numel() for n in matrices) / 8
    lost = []
    for known in ([], prices):
        chosen = steps_for(state, matrices, known, size)
        assert coded_bytes(state, chosen) == pytest.approx(size, rel=0.01)
        lost.append(cost({n: m.rounded(state[n]) for n, m in chosen.items()}))
    assert lost[1] < 0.8 * lost[0]


def test_the_divergence_is_that_of_probabilities() -> None:
    latent = model()
    whole = latent.whole()
    assert divergence_of(whole, {}, [(BATCH, ASKED)]) == pytest.approx(0, abs=1e-6)
    changed = {"embedding.weight": latent.state["embedding.weight"] * 1.3}
    other = latent.whole()
    other.load_state_dict({**latent.state, **changed})
    with torch.no_grad():
        rows = (m(BATCH)[:, :-1][ASKED[:, 1:]] for m in (whole, other))
        own, theirs = (row.log_softmax(-1) for row in rows)
    expected = torch.nn.functional.kl_div(theirs, own, log_target=True, reduction="sum")
    found = divergence_of(whole, changed, [(BATCH, ASKED)])
    assert found == pytest.approx(float(expected) / len(own), rel=1e-4)


def test_a_model_without_unused_tokens_says_the_same_of_the_others() -> None:
    latent = model()
    kept = sorted({*range(290), *BATCH.flatten().tolist()})
    smaller = pruned(latent, kept)
    assert smaller.settings.vocab_size == len(kept) < latent.settings.vocab_size
    places = torch.tensor([kept.index(t) for t in BATCH.flatten().tolist()]).view_as(BATCH)
    with torch.no_grad():
        before, after = latent.whole()(BATCH)[..., kept], smaller.whole()(places)
    torch.testing.assert_close(after, before)


def test_a_pruned_tokenizer_reads_what_is_taught_as_before() -> None:
    texts = ["copy k m a t", "sort 52814", "the cat sat on the mat", "max 4718:2905"]
    documents = TOKENIZER.encode_batch(texts)
    own, before = TOKENIZER.pruned(documents)
    assert own.vocab_size == len(before) < TOKENIZER.vocab_size
    again = own.encode_batch(texts)
    assert [[before[i] for i in ids] for ids in again] == documents
    apart = [*TOKENIZER.encode("story: "), *TOKENIZER.encode("once")]  # parts that are read alone
    own, before = TOKENIZER.pruned([apart])
    assert [before[i] for i in own.encode("once")] == TOKENIZER.encode("once")
    for text in ("\N{SNOWMAN} other words, quickly", "unseen 12345"):
        assert own.decode(own.encode(text)) == text
    assert isinstance(own, Tokenizer) and own.files().keys() == TOKENIZER.files().keys()


# -- whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run whose points are all kept."""
    root = tmp_path_factory.mktemp("compression")
    with pytest.MonkeyPatch.context() as patch:
        as_if_able(patch)
        return root, run(root, f"{PHASE}.control=true")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_FOLDER, str(tmp_path / "cache"))


@needs_fork
def test_the_smallest_point_that_holds_is_handed_over(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    artifacts = reference[1]["results"]["final_compression"].artifacts
    names = [own["name"] for own in artifacts["points"]]
    assert names == ["input", "coded_1", "coded_2", "student_1", "control_1", "fp32_control"]
    controls = [own["name"] for own in artifacts["points"] if own["gate"]]
    assert controls == ["control_1", "fp32_control"]
    whole = artifacts["tables"][0][1][:3]
    told = next(row for row in artifacts["tables"][0] if row[0] == "fp32_control")
    assert told[1:3] == whole[1:3], "its bytes are those of FP32"
    sizes = {own["name"]: own["bytes"] for own in artifacts["points"]}
    assert sizes["input"] > sizes["coded_1"] > sizes["coded_2"] > sizes["student_1"]
    assert artifacts["chosen"] == "student_1"
    assert "a student of" in artifacts["headline"]["verdict"]


@needs_fork
@pytest.mark.usefixtures("cache")
def test_the_file_stands_alone_and_is_as_small_as_it_says(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    result = reference[1]["results"]["final_compression"]
    place = result.artifacts["models"][0].path
    alone = Path(shutil.copy(place / "model.forge", tmp_path / "alone.forge"))
    point = next(p for p in result.artifacts["points"] if p["name"] == "student_1")
    assert alone.stat().st_size == point["bytes"] + point["tokenizer_bytes"]
    assert result.metrics["file_size_mb"] == pytest.approx(alone.stat().st_size / 1e6)
    opened, own = open_model(unpacked(alone)).network, open_model(place).network
    assert all(torch.equal(t, own.state_dict()[n]) for n, t in opened.state_dict().items())
    learned = learned_record(unpacked(alone))
    assert learned["tools"] == ["calc", "clock"] and learned["persona"]["name"] == "Zoe"
    metadata = read_metadata(place).model_dump()
    assert {"tools", "persona", "strategies", "levels", "compression_ratio"} <= set(metadata)
    assert set(read_container(alone)) == {
        *("model.safetensors", "config.json", "tokenizer.json", "learned.json"),
    }


@needs_fork
@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_command_opens_the_file_in_a_process_of_its_own(
    reference: tuple[Path, dict[str, Any]],
) -> None:
    place = reference[1]["results"]["final_compression"].artifacts["models"][0].path
    words = ["eval", str(place / "model.forge"), "--tasks", "copy", "--items", "5", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "agent_forge", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and '"copy"' in done.stdout, done.stderr


@needs_fork
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("make")), reason="no cc, or no make")
@pytest.mark.usefixtures("cache")
def test_the_program_runs_the_file(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Codes of steps and a vocabulary that was pruned, in C as in Python."""
    place = reference[1]["results"]["final_compression"].artifacts["models"][0].path
    folder = unpacked(place / "model.forge")
    write_bundle(folder, tmp_path / "bundle")
    program = built(tmp_path / "bundle", tmp_path / "built", "-O2")
    model, own = open_model(folder), Tokenizer.load(folder)
    for text in ("copy k m a t", "sort 52814", "the cat sat quickly, twice", "max 4718:2905"):
        ids = own.encode(text)
        assert list(map(int, program.output(folder, text, "--encode").split())) == ids
        wanted = by_torch(model.network, ids)  # type: ignore[arg-type]
        torch.testing.assert_close(program.logits(folder, ids), wanted, rtol=0, atol=1e-3)


@needs_fork
def test_every_metric_of_the_table_is_logged(reference: tuple[Path, dict[str, Any]]) -> None:
    own = {metric.name for metric in METRICS if metric.phase == "final_compression"}
    names = {name for _, _, values in metrics(reference[0]) for name in values}
    assert not own - {found.name for name in names if (found := find_metric(name))}


@needs_fork
def test_a_point_that_does_not_hold_is_tried_gently_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch, coded_1=30, coded_1_again=50, coded_2=30, coded_2_again=30, student_1=9)
    states: dict[str, LatentModel] = {}
    coded = Compression._coded

    def noted(own: Compression, latent: LatentModel, ratio: float, name: str, *more: Any) -> Any:
        states[name] = coded(own, latent, ratio, name, *more)
        return states[name]

    monkeypatch.setattr(Compression, "_coded", noted)
    result = run(tmp_path)["results"]["final_compression"]
    kept = {own["name"]: own["gate"] == "" for own in result.artifacts["points"]}
    assert kept == {
        **{"input": True, "coded_1": False, "coded_1_again": True, "coded_2": False},
        **{"coded_2_again": False, "student_1": False},
    }
    assert result.artifacts["chosen"] == "coded_1_again"
    left = states["coded_1_again"].opened().state_dict()
    assert all(torch.equal(t, left[n]) for n, t in result.model.state_dict().items())
    assert (folder(tmp_path) / "events.jsonl").read_text().count("rolled_back") == 3


@needs_fork
def test_if_nothing_holds_the_input_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = {f"{name}{again}": 10 for name in ("coded_1", "coded_2") for again in ("", "_again")}
    as_if_able(monkeypatch, **low, student_1=10)
    result = run(tmp_path)["results"]["final_compression"]
    assert result.artifacts["chosen"] == "input"
    assert result.artifacts["headline"]["verdict"].startswith("no point kept what is asked for")
    given = open_model(tmp_path / "sessions" / "before" / "phase7_edge" / "packed").network
    own = result.model.state_dict()
    assert all(torch.equal(t, own[n]) for n, t in given.state_dict().items() if "embed" not in n)


@needs_fork
def test_weights_that_a_point_goes_back_to_have_the_recorded_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_able(monkeypatch, coded_1=30)
    look = Skills.right

    def otherwise(own: Skills, own_network: Any, name: str) -> Any:
        found = look(own, own_network, name)
        return {**found, "tools": [True] * 100} if "again" in name and "before" in name else found

    monkeypatch.setattr(Skills, "right", otherwise)
    with pytest.raises((DamagedFile, AssertionError), match="score otherwise"):
        run(tmp_path)


@needs_fork
def test_nothing_is_made_up(tmp_path: Path) -> None:
    """Real questions to models that were never trained: they keep nothing of nothing."""
    result = run(tmp_path)["results"]["final_compression"]
    first = result.artifacts["tables"][0][1]
    assert result.success and first[:1] + first[4:6] == ["fp32", 0.0, "-"], first
    assert result.artifacts["points"][0]["retention"] == {}


@needs_fork
@pytest.mark.parametrize(
    ("stage", "step"), [("thaw", 1), ("coded_2", 2), ("student_1_whole", 3), ("student_1", 1)]
)
def test_killed_in_any_stage_it_ends_in_the_same_bytes(
    stage: str,
    step: int,
    reference: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(record: dict[str, Any]) -> None:
        if record.get("stage") == stage and record.get("step") == step:
            os.kill(os.getpid(), signal.SIGKILL)

    as_if_able(monkeypatch)
    control = f"{PHASE}.control=true"
    assert exit_code(forked(lambda: run(tmp_path, control, listener=die))) == -signal.SIGKILL
    run(tmp_path, control)
    assert made(tmp_path) == made(reference[0])
    ours, theirs = (
        [row for row in metrics(root) if "compression/latency_512_ms" not in row[2]]
        for root in (tmp_path, reference[0])
    )
    assert ours == theirs
