"""Figures of a recorded run: each kind is there, shows what the files have, in both themes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from agent_forge.pipeline.run_view import RunView
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore
from agent_forge.ui import figures_evolution, figures_phases
from agent_forge.ui.figures import figures_of, radar, training
from agent_forge.ui.theme import COLOURS, GREY, GROUNDS, Look, cell, colour, plain, safe
from tests.support.pages import hostile_run
from tests.support.recorded_runs import NAME, RECORDED

FOLDER = RECORDED / "sessions" / NAME
SIZE, LOSS, RADAR = "Size against quality", "Training loss", "Accuracy by domain"
KINDS = {
    None: ["Accuracy on old tasks, phase by phase", "Time of each phase", "Processor", "Memory"],
    "cognate": [LOSS, RADAR],
    "evomerge": [
        *("Evolution", "Diversity", "Combinations", "Lineage of the champion"),
        *("Gain of the champion over each", RADAR),
    ],
    "quietstar": [LOSS, "Thoughts against controls", "Thoughts by level", RADAR],
    "bitnet": [LOSS, "Sensitivity to rounding", "Weights that are 0", RADAR],
    "forge": [
        *(LOSS, "How far each family reaches", "Solved by size"),
        *("Levels of the curriculum", RADAR),
    ],
    "baking": [LOSS, "Tools and persona", "Rounds of baking", RADAR],
    "edge": [LOSS, SIZE, RADAR],
    "final_compression": [LOSS, SIZE, RADAR],
}


@pytest.fixture(scope="module")
def view() -> RunView:
    return RunView(SessionStore(RECORDED), NAME)


def figure(view: RunView, phase: str | None, title: str, theme: str = "light") -> go.Figure:
    return dict(figures_of(view, phase, theme))[title]


def everything(view: RunView, theme: str = "light") -> Iterator[tuple[str, go.Figure]]:
    for phase in KINDS:
        for title, found in figures_of(view, phase, theme):
            yield f"{phase}: {title}", found


def trace(found: go.Figure, name: str) -> Any:
    return next(one for one in found.data if one.name == name)


def measured(phase: str, name: str) -> list[tuple[int | None, float]]:
    """What a metric of a phase was, straight from the file."""
    lines = map(json.loads, (FOLDER / "metrics.jsonl").read_text().splitlines())
    rows = [r for r in lines if r["phase"] == phase and name in r["metrics"]]
    return [(r["step"], r["metrics"][name]) for r in rows]


def artifacts(folder: str) -> dict[str, Any]:
    return dict(files.read_checked(FOLDER / folder / "state.json")["artifacts"])


def table(folder: str, first: str) -> list[dict[str, Any]]:
    rows = next(rows for rows in artifacts(folder)["tables"] if rows[0][0] == first)
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_every_kind_is_there(view: RunView) -> None:
    assert {phase: [title for title, _ in figures_of(view, phase)] for phase in KINDS} == KINDS


# -- what they show --------------------------------------------------------------------------------


def test_training_shows_loss_and_held_out(view: RunView) -> None:
    found = figure(view, "cognate", LOSS)
    for kind, end in (("solid", "loss_avg_100"), ("dash", "evaluation_loss")):
        points = measured("cognate", f"trunk/train/{end}")
        drawn = next(t for t in found.data if t.name == "trunk" and t.line.dash == kind)
        assert list(zip(drawn.x, drawn.y, strict=True)) == points and len(points) > 3
    assert {t.name for t in found.data} == {"trunk", "model_1", "model_2", "model_3", "control"}
    assert trace(found, "control").line.color == GREY


def test_the_evolution_has_band_baselines_and_recipe(view: RunView) -> None:
    found = figure(view, "evomerge", "Evolution")
    for name, metric in (
        ("best so far", "best_fitness"),
        ("mean of a generation", "avg_fitness"),
        ("worst to best", "max_fitness"),
    ):
        drawn = trace(found, name)
        points = measured("evomerge", f"generation/{metric}")
        assert list(zip(drawn.x, drawn.y, strict=True)) == points and len(points) == 5
    below = found.data[list(found.data).index(trace(found, "worst to best")) - 1]
    assert list(below.y) == [v for _, v in measured("evomerge", "generation/min_fitness")]
    names = ("reasoning", "memory_integration", "adaptive_computation")
    for number, name in enumerate(names):
        value = measured("evomerge", f"generation/parent_{number}_fitness")[-1][1]
        assert set(trace(found, f"parent tinytitan-{name}").y) == {value}
    average = measured("evomerge", "generation/plain_average_fitness")[-1][1]
    assert set(trace(found, "plain average").y) == {average}
    state = files.read_checked(FOLDER / "phase2_evomerge" / "state.json")
    recipe = state["metrics"]["best_merge_technique"]
    assert recipe in " ".join(found.layout.title.text.split("<br>"))


def test_parents_are_drawn_where_only_the_journal_has_them() -> None:
    rows = [
        {"record": "candidate", "key": "a", "origin": "parent 0", "operation": {"kind": "parent"}},
        {"record": "candidate", "key": "b", "origin": "average", "operation": {"kind": "average"}},
        {"record": "candidate", "key": "c", "origin": "combo", "operation": {"kind": "merge"}},
    ]
    rows = [{**row, "score": {"fitness": n / 4}} for n, row in enumerate(rows)]
    candidates, references = figures_evolution.measured(rows)
    assert set(candidates) == {"a", "b", "c"} and references == {"parent 0": 0, "average": 0.25}
    none = [*rows, {"record": "floor", "domains": []}]
    assert figures_evolution.measured(none)[1] == references
    floor = [*rows, {"record": "floor", "domains": ["memory"]}]
    assert figures_evolution.measured(floor)[1] == {}  # what they were scored by no longer counts


def test_diversity_has_the_thresholds_that_act(view: RunView) -> None:
    drawn = figure(view, "evomerge", "Diversity").data[0]
    points = measured("evomerge", "generation/diversity_score")
    assert list(zip(drawn.x, drawn.y, strict=True)) == points
    rows = [{"generation": 0, "diversity_score": 0.5}]
    settings = {"min_diversity": 0.3, "diversity_reseed_threshold": 0.2}
    for strategy, levels in (("spec", {0.3, 0.2}), ("ga", {0.3}), ("auto", set())):
        found = figures_evolution.diversity(rows, {**settings, "strategy": strategy}, Look())
        assert found is not None and {shape.y0 for shape in found.layout.shapes} == levels


def test_combinations_show_usage_and_mean_fitness(view: RunView) -> None:
    bars, dots = figure(view, "evomerge", "Combinations").data
    known = [f"{n:03b}" for n in range(8)]
    assert list(bars.x) == list(dots.x) == known
    for n in range(8):
        assert bars.y[n] == measured("evomerge", f"combo/{n}/usage")[-1][1]
        assert dots.y[n] == measured("evomerge", f"combo/{n}/avg_fitness")[-1][1]
    ticks = figure(view, "evomerge", "Combinations").layout.xaxis.ticktext
    assert ticks[0] == "000<br>linear<br>dare<br>franken" and ticks[6][:8] == "110<br>s"


def test_the_lineage_goes_from_parents_to_champion(view: RunView) -> None:
    edges, nodes = figure(view, "evomerge", "Lineage of the champion").data
    kept = files.read_json(FOLDER / "phase2_evomerge" / "champion" / "lineage.json")["candidates"]
    assert len(nodes.x) == len(kept) and nodes.text[-1] == "champion"
    assert nodes.text[0] == "tinytitan-reasoning" and nodes.x[0] == 0
    assert len(edges.x) == 3 * sum(len(row["inputs"]) for row in kept)
    assert nodes.x[-1] == max(nodes.x) > 0
    fitness = files.read_checked(FOLDER / "phase2_evomerge" / "state.json")["metrics"]
    assert f"fitness {fitness['best_fitness']:.4g}" in nodes.hovertext[-1]


def test_the_gain_is_that_of_the_verdict(view: RunView) -> None:
    dots = figure(view, "evomerge", "Gain of the champion over each").data[0]
    rivals = artifacts("phase2_evomerge")["verdict"]["rivals"]
    assert set(dots.y) == set(rivals)
    for n, name in enumerate(dots.y):
        gain = rivals[name]["comparison"]["overall"]["gains"]["bits_per_byte"]
        assert dots.x[n] == gain["value"]
        assert dots.x[n] + dots.error_x.array[n] == pytest.approx(gain["high"])
        assert dots.x[n] - dots.error_x.arrayminus[n] == pytest.approx(gain["low"])


@pytest.mark.parametrize(
    ("phase", "models"),
    [
        ("cognate", {"model_1", "model_2", "model_3", "trunk", "average", "control"}),
        ("quietstar", {"input", "reasoning"}),
        ("bitnet", {"parent", "rounded", "ternary"}),
        ("edge", {"input", "edge"}),
    ],
)
def test_a_radar_has_the_accuracy_of_each_domain(
    view: RunView, phase: str, models: set[str]
) -> None:
    found = figure(view, phase, RADAR)
    assert {one.name for one in found.data} == models
    for one in found.data:
        assert len(one.theta) > 3 and one.theta[0] == one.theta[-1] and one.r[0] == one.r[-1]
        for domain, share in zip(one.theta, one.r, strict=True):
            assert share == measured(phase, f"{one.name}/accuracy/{domain}")[-1][1]


def test_the_radar_of_the_evolution_is_the_verdict(view: RunView) -> None:
    verdict = artifacts("phase2_evomerge")["verdict"]
    champion = trace(figure(view, "evomerge", RADAR), "champion")
    for domain, share in zip(champion.theta, champion.r, strict=True):
        assert share == verdict["champion"]["raw"][f"{domain}/accuracy"]


def test_a_radar_of_two_domains_is_none() -> None:
    assert radar({"a": {"x": 1.0, "y": 0.5}}, Look(), "") is None


def test_thoughts_stand_beside_their_controls(view: RunView) -> None:
    shares = artifacts("phase3_quietstar")["theatre"]["accuracy"]
    found = figure(view, "quietstar", "Thoughts against controls")
    assert [bar.name for bar in found.data][:2] == ["own", "none"]
    assert {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in found.data} == shares
    assert trace(found, "none").marker.color == GREY
    by_level = artifacts("phase3_quietstar")["theatre"]["by_level"]
    for one in figure(view, "quietstar", "Thoughts by level").data:
        key = "none" if one.line.dash == "dash" else "own"
        own = {int(n): shares.get(key) for n, shares in by_level[one.name].items()}
        assert dict(zip(one.x, one.y, strict=True)) == own


def test_sensitivity_and_sparsity_are_by_matrix(view: RunView) -> None:
    costs = {row["matrices"]: row["nats more alone"] for row in table("phase4_bitnet", "matrices")}
    bars = figure(view, "bitnet", "Sensitivity to rounding").data
    assert {y: x for bar in bars for x, y in zip(bar.x, bar.y, strict=True)} == costs
    zeros = artifacts("phase4_bitnet")["zeros"]
    heat = figure(view, "bitnet", "Weights that are 0").data[0]
    assert list(heat.x) == ["layer 0", "layer 1", "elsewhere"]
    rows = dict(zip(heat.y, heat.z, strict=True))
    assert rows["blocks.attention.q"][1] == zeros["blocks.1.attention.q.weight"]
    assert [*rows["gate.inner"]] == [None, None, zeros["gate.inner.weight"]]
    assert sum(v is not None for row in rows.values() for v in row) == len(zeros)


def test_the_edge_of_ability_and_its_curriculum(view: RunView) -> None:
    dots = figure(view, "forge", "How far each family reaches").data[0]
    for n, name in enumerate(dots.y):
        family, _, model = name.partition(", ")
        ends = (measured("forge", f"{model}/edge/{family}/{e}")[-1][1] for e in ("reach", "high"))
        reach, high = ends
        assert dots.x[n] == reach and dots.error_x.array[n] == high - reach
    solved = artifacts("phase5_forge")["solved"]
    for one in figure(view, "forge", "Solved by size").data:
        own = solved["input" if one.line.dash == "dash" else "forged"][one.name]
        assert {str(x): y for x, y in zip(one.x, one.y, strict=True)} == own
    looks = artifacts("phase5_forge")["looks"]
    heat = figure(view, "forge", "Levels of the curriculum").data[0]
    assert len(heat.x) == len(looks)
    for name, shares in zip(heat.y, heat.z, strict=True):
        family, size = name.split(", size ")
        assert list(shares) == [look.get(family, {}).get(size) for look in looks]


def test_tools_and_persona_before_and_after(view: RunView) -> None:
    rows = [row for row in table("phase6_baking", "asked") if isinstance(row["items"], int)]
    for bar in figure(view, "baking", "Tools and persona").data:
        assert list(bar.x) == [row[bar.name] for row in rows]
        assert list(bar.y) == [f"{row['asked']}, n = {row['items']}" for row in rows]
    rounds = artifacts("phase6_baking")["rounds"]
    for one in figure(view, "baking", "Rounds of baking").data:
        assert list(one.y) == [r["after"][one.name] for r in rounds]


def test_size_against_quality(view: RunView) -> None:
    points = artifacts("phase8_final_compression")["points"]
    drawn = figure(view, "final_compression", SIZE).data[0]
    known = [(p["bytes"], p["retention"]["mean"], p["name"]) for p in points]
    assert list(zip(drawn.x, drawn.y, drawn.text, strict=True)) == known
    chosen = artifacts("phase8_final_compression")["chosen"]
    assert drawn.marker.symbol[list(drawn.text).index(chosen)] == "star"
    edge, state = figure(view, "edge", SIZE).data[0], artifacts("phase7_edge")
    sizes = [state["performance_profile"]["input"]["model_bytes"]]
    sizes += [cut["profile"]["model_bytes"] for cut in state["cuts"]]
    assert list(edge.x) == sizes
    config = files.read_checked(FOLDER / "session.json")["config"]["phases"]
    level = figure(view, "edge", SIZE).layout.shapes[0]
    assert level.y0 == level.y1 == config["edge"]["least_retention"]


def test_what_was_taken_back_is_open() -> None:
    points = [("input", 100, 1.0, ""), ("a", 50, 0.9, ""), ("b", 20, 0.4, "the persona fell")]
    found = figures_phases.frontier(points, Look(), 0.8, "a")
    assert found is not None
    assert list(found.data[0].marker.symbol) == ["circle", "star", "circle-open"]
    assert found.data[0].hovertext[2] == "b: the persona fell"
    assert "open: taken back" in found.layout.title.text


def test_the_machine_over_time(view: RunView) -> None:
    drawn = figure(view, None, "Memory").data[0]
    assert list(drawn.y) == [v for _, v in measured("system", "system/process_rss_mb")]
    assert drawn.x[0] == 0 and list(drawn.x) == sorted(drawn.x) and len(drawn.x) > 3
    both = figure(view, None, "Processor").data
    assert [len(one.y) for one in both] == [len(drawn.y)] * 2


def test_time_and_accuracy_phase_by_phase(view: RunView) -> None:
    bars = figure(view, None, "Time of each phase").data[0]
    times = {p.name: files.read_checked(p.folder / "state.json")["seconds"] for p in view.phases}
    assert dict(zip(bars.y, bars.x, strict=True)) == times and len(times) == 8
    lines = figure(view, None, "Accuracy on old tasks, phase by phase").data
    assert {line.name for line in lines} == {"reasoning", "memory", "adaptive"}
    for line in lines:
        last = dict(zip(line.x, line.y, strict=True))
        for phase, model in (("quietstar", "reasoning"), ("bitnet", "ternary"), ("edge", "edge")):
            assert last[phase] == measured(phase, f"{model}/accuracy/{line.name}")[-1][1]


# -- how they look ---------------------------------------------------------------------------------


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_differ_in_the_template_alone(view: RunView, theme: str) -> None:
    ground, ink, _ = GROUNDS[theme]
    for title, found in everything(view, theme):
        assert found.layout.template.layout.paper_bgcolor == ground, title
        assert found.layout.template.layout.font.color == ink
    first, second = (
        [json.loads(found.update_layout(template=None).to_json()) for _, found in figures]
        for figures in (everything(view, "light"), everything(view, "dark"))
    )
    assert first == second


def test_captions_say_how_often_which_run_and_which_config(view: RunView) -> None:
    for title, found in everything(view):
        text = " ".join(found.layout.title.text.split("<br>"))
        assert re.search(r"\bn (= \d|of each)", text), (title, text)
        assert f"run {NAME} | config {view.config_hash[:12]}" in text, (title, text)


def test_axes_have_units(view: RunView) -> None:
    without = (RADAR, "Combinations", "Weights that are 0")  # its own titles, or none
    for title, found in everything(view):
        axes = found.layout.xaxis.title.text, found.layout.yaxis.title.text
        assert any(axes) or title.endswith(without), title


def rgb(shade: str) -> tuple[int, ...]:
    return tuple(int(shade[i : i + 2], 16) for i in (1, 3, 5))


def test_all_colours_are_of_the_palette(view: RunView) -> None:
    allowed = {*map(str.upper, COLOURS), GREY}
    faint = {f"{r},{g},{b}" for r, g, b in map(rgb, COLOURS)}
    for title, found in everything(view):
        content = json.loads(found.to_json())
        for one in content["data"]:  # but for heat maps, whose scale is made for it
            assert one.pop("colorscale", [[0, "#00224e"]])[0][1] == "#00224e", title  # Cividis
        text = json.dumps([content["data"], {**content["layout"], "template": None}])
        assert {c.upper() for c in re.findall(r"#[0-9a-fA-F]{6}", text)} <= allowed, title
        assert set(re.findall(r"rgba\((\d+,\d+,\d+)", text)) <= faint, title


def seen(shade: str, matrix: np.ndarray) -> np.ndarray:
    """A colour in CIE Lab, as an eye sees it that the matrix stands for."""
    srgb = np.array(rgb(shade)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x = np.array(to_xyz) @ np.clip(matrix @ linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes 2009, of the whole loss of one kind of cone.
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    ),
    "deuteranopia": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    ),
    "tritanopia": np.array(
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]
    ),
}


@pytest.mark.parametrize("eye", EYES)
def test_colours_can_be_told_apart_and_from_the_ground(eye: str) -> None:
    """Lab distances: 2 is just seen, 10 at a glance. The first four are what most figures need."""
    points = [seen(shade, EYES[eye]) for shade in COLOURS]
    apart = [float(np.linalg.norm(a - b)) for a, b in combinations(points[:4], 2)]
    assert min(apart) > 10, apart
    for ground in (GROUNDS["light"][0], GROUNDS["dark"][0]):
        away = [float(np.linalg.norm(p - seen(ground, EYES[eye]))) for p in points]
        assert min(away) > 25, away


def test_a_run_has_one_colour_in_all_its_figures(view: RunView) -> None:
    second = dict(figures_of(view, "evomerge", number=1))["Evolution"]
    assert trace(second, "best so far").line.color == colour(1) == COLOURS[1]
    assert trace(second, "mean of a generation").line.color == COLOURS[0]


def test_legends_have_room(view: RunView) -> None:
    many = {f"a long name of a training {n}": [n, n] for n in range(9)}
    few = Look().lines([("one", "", [0, 1], [1, 2])], "", "x", "y")
    rows = [(name, "", [0, 1], values) for name, values in many.items()]
    found = Look().lines(rows, "", "x", "y")
    assert few is not None and found is not None
    more = found.layout.height - few.layout.height
    assert more == found.layout.margin.t - few.layout.margin.t > 50


# -- whatever is in the files ----------------------------------------------------------------------


def test_hostile_names_stay_text(root: Path) -> None:
    view = hostile_run(root)
    titled = [one for phase in (None, "cognate", "bitnet") for one in figures_of(view, phase)]
    assert [title for title, _ in titled if title != LOSS] == [
        *(RADAR, "Sensitivity to rounding", "Weights that are 0")
    ]
    for title, found in titled:
        content = found.to_json()
        assert "<script" not in content and "<img" not in content, title
        assert "\\u202e" not in content and "\\u0000" not in content


def test_texts_are_cut_and_cleaned() -> None:
    assert plain("a" * 1000) == "a" * 77 + "..." and plain("a\x00\n\u202eb") == "a???b"
    assert safe("<b>&") == "&lt;b&gt;&amp;" and plain("\u00e9\u4e2d") == "\u00e9\u4e2d"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((value, "-") for value in (None, "", math.nan, math.inf, -math.inf)),
        *((0.0, "0"), (0, "0"), (1 / 3, "0.3333"), (41801.95, "41,802"), (1e20, "1e+20")),
        *((12345, "12345"), ("text", "text"), (-1e-7, "-1e-07"), (True, "True")),
    ],
)
def test_a_cell_of_a_table(value: Any, shown: str) -> None:
    assert cell(value) == shown


def test_what_was_not_measured_is_a_gap() -> None:
    rows = [{"generation": n, "best_fitness": 0.5} for n in range(3)]
    rows[1]["avg_fitness"] = 0.25
    found = figures_evolution.evolution(rows, {}, "", Look())
    assert found is not None
    assert tuple(trace(found, "mean of a generation").y) == (None, 0.25, None)
    assert training({}, Look()) is None
    assert figures_evolution.evolution([], {}, "", Look()) is None
    assert figures_phases.sparsity({}, Look()) is None
    assert figures_phases.levels([], Look()) is None
    assert figures_phases.frontier([], Look()) is None


def test_what_is_not_finite_is_no_point(root: Path) -> None:
    store = SessionStore(root)
    store.create({}, "x: 1\n", session_id="s1", details={"asked": {"phases": ["cognate"]}})
    lines = ("1.5", "NaN", "Infinity", "2.5")
    text = '{"phase":"cognate","step":%d,"time":1,"metrics":{"a/train/loss_avg_100":%s}}\n'
    content = "".join(text % row for row in enumerate(lines)).encode()
    files.write_bytes(store.path("s1") / "metrics.jsonl", content)
    drawn = figure(RunView(store, "s1"), "cognate", LOSS).data[0]
    assert list(drawn.x) == [0, 3] and list(drawn.y) == [1.5, 2.5]


@pytest.mark.parametrize("phase", [name for name in KINDS if name])
@pytest.mark.parametrize("artifacts", [{}, {"tables": 3, "verdict": {"rivals": {"x": {}}}}])
def test_a_record_of_another_version_leaves_figures_out(
    root: Path, phase: str, artifacts: dict[str, Any]
) -> None:
    store = SessionStore(root)
    store.create({}, "x: 1\n", session_id="s1", details={"asked": {"phases": [phase]}})
    view = RunView(store, "s1")
    view.phase(phase).state |= {"artifacts": artifacts, "status": "completed"}
    assert figures_of(view, phase) == []
