"""The statistics of a sweep, and its page in a browser."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from agentrl_train.storage.atomic_io import write_file
from agentrl_train.sweep.page import figure, render
from agentrl_train.sweep.plan import PlannedRun, Sweep, load_sweep
from agentrl_train.sweep.results import area, results
from agentrl_train.sweep.statistics import holm, interval, p_value, share_interval, t_quantile, t_tails
from tests.browser import CHROMIUM, needs_chromium
from tests.train.sweep.test_plan import write

STEPS = 20
TWO_TASKS = {"shop": 1.0, "sql": 1.0}


def write_run(
    run: PlannedRun, *, slope: float, dropped: int = 0, ease: Mapping[str, float] = TWO_TASKS
) -> None:
    """Write the files of a finished run. ``ease`` maps its tasks to a factor of their success."""
    run.folder.mkdir(parents=True)
    chance = random.Random(f"{run.variant} {run.seed}")
    lines, evaluations = [], []
    for step in range(STEPS + 1):
        share = min(1.0, 0.2 + slope * step + chance.uniform(-0.05, 0.05))
        tasks = {
            task: {"success": part * share, "reward": 2 * part * share, "episodes": 8.0}
            for task, part in ease.items()
        }
        if step:
            lines.append({"step": step, "tasks": tasks, "dropped_groups": float(dropped * step)})
        if step % 5 == 0:
            evaluations += [
                {
                    "name": f"step {step}",
                    "policy_version": step,
                    "task": task,
                    "success": part * share,
                    "greedy": part * share / 2,
                    "reward": 2 * part * share,
                }
                for task, part in ease.items()
            ]
    for name, content in (("metrics", lines), ("evaluations", evaluations)):
        (run.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    (run.folder / "summary.json").write_text("{}")
    write_file(run.usage, b'{"wall_s": 40.0, "processor_s": 30.0}')


def make(
    folder: Path, presets: str, *, slopes: dict[str, float], dropped: int = 0
) -> tuple[Sweep, dict[str, Any]]:
    text = f"seeds = [0, 1, 2, 3, 4]\npresets = [{presets}]\n[variants.dead]\nrun.steps = 30\n"
    sweep = load_sweep(write(folder, text.replace('"out"', f'"{folder}"')), cores=2)
    for run in sweep.runs:
        if run.variant in slopes:
            write_run(run, slope=slopes[run.variant], dropped=dropped if run.variant == "dapo" else 0)
    failed = {run.folder: "the engine <broke>" for run in sweep.runs if run.variant == "dead"}
    return sweep, results(sweep, command="agentrl-train sweep sweep.toml", failed=failed)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    slopes = {"grpo": 0.02, "rloo": 0.035, "dapo": 0.01}
    return make(tmp_path, '"grpo", "rloo", "dapo"', slopes=slopes, dropped=1)[1]


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (4, 2.7764), (20, 2.0860), (30, 2.0423), (120, 1.9799)]
)
def test_quantiles_match_students_t(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_interval_of_a_mean_covers_it_in_95_of_100_experiments() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, size=(4000, 5))
    found = [interval(list(row)) for row in draws]
    covered = np.mean([one is not None and one["low"] < 3.0 < one["high"] for one in found])
    assert abs(covered - 0.95) < 0.01


def test_interval_of_one_value_has_no_ends_and_of_no_values_is_none() -> None:
    assert interval([0.5]) == {"mean": 0.5, "low": None, "high": None, "n": 1}
    assert share_interval([0.5], episodes=64) == interval([0.5])
    assert interval([]) is share_interval([], episodes=64) is None


@pytest.mark.parametrize(("mean", "covered"), [(0.2, 0.92), (0.5, 0.92), (0.8, 0.92), (0.95, 0.86)])
def test_interval_of_shares_covers_their_mean_and_stays_inside_the_scale(mean: float, covered: float) -> None:
    """Runs differ and have 64 episodes each. 95 % intervals of Student's t cover 68 % of such cases."""
    draws = np.random.default_rng(0)
    skill = draws.beta(3 * mean, 3 * (1 - mean), size=(1000, 5))
    found = [share_interval(list(shares), episodes=64) for shares in draws.binomial(64, skill) / 64]
    assert all(one and 0.0 <= one["low"] <= one["mean"] <= one["high"] <= 1.0 for one in found)
    assert covered < np.mean([one["low"] <= mean <= one["high"] for one in found if one]) < 0.98


def test_runs_that_agree_count_as_one_trial_each() -> None:
    all_right = share_interval([1.0] * 5, episodes=64)
    assert all_right is not None
    assert (all_right["high"], all_right["low"]) == (1.0, pytest.approx(1 / (1 + 2.7764**2 / 5), abs=1e-4))
    nearly = share_interval([1.0, 1.0, 1.0, 1.0, 0.98], episodes=64)
    assert nearly is not None
    assert 0.9 < nearly["low"] < nearly["high"] < 1.0
    split = share_interval([0.0, 0.0, 0.0, 1.0, 1.0], episodes=64)
    assert split is not None
    assert 0.0 < split["low"] < 0.1
    assert 0.8 < split["high"] < 1.0


@pytest.mark.parametrize(
    ("t", "degrees", "p"), [(12.7062, 1, 0.05), (4.6041, 4, 0.01), (3.2498, 9, 0.01), (0.7, 9, 0.5016)]
)
def test_p_values_match_students_t(t: float, degrees: int, p: float) -> None:
    assert t_tails(t, degrees) == t_tails(-t, degrees) == pytest.approx(p, abs=1e-4)


def test_p_value_agrees_with_the_interval_of_a_difference() -> None:
    differences = [0.1, 0.3, 0.2, 0.05, 0.4]
    found, p = interval(differences), p_value(differences)
    assert found is not None
    assert p is not None
    assert (found["low"] > 0) == (p < 0.05)
    assert p_value([0.2]) is None
    assert p_value([0.0, 0.0]) == 1.0


def test_holm_adjusts_for_the_number_of_comparisons_and_keeps_their_order() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_area_of_every_variant_is_tested_against_the_baseline(found: dict[str, Any]) -> None:
    by_name = {one["name"]: one["difference"]["area"] for one in found["variants"]}
    assert by_name["rloo"]["p"] < by_name["rloo"]["p_holm"] < 0.05
    assert "p_holm" not in by_name["grpo"]
    assert by_name["dead"] is None
    assert f", p {by_name['rloo']['p_holm']:.2g}" in render(found)


def test_area_is_the_mean_height_up_to_the_span() -> None:
    assert area([(0, 0.0), (10, 1.0)], 10) == pytest.approx(0.5)
    assert area([(0, 0.0), (10, 1.0), (20, 1.0)], 20) == pytest.approx(0.75)
    assert area([(0, 0.0), (10, 1.0)], 5) == pytest.approx(0.25)
    assert area([(0, 0.0)], 5) is None


def test_variants_are_ranked_by_final_held_out_success(found: dict[str, Any]) -> None:
    assert found["ranking"] == ["rloo", "grpo", "dapo"]
    assert (found["finished"], found["planned"]) == (15, 20)
    by_name = {one["name"]: one for one in found["variants"]}
    assert by_name["rloo"]["final"]["success"]["mean"] == pytest.approx(0.9, abs=0.03)
    assert by_name["rloo"]["final"]["greedy"]["mean"] == pytest.approx(0.45, abs=0.02)
    assert by_name["rloo"]["difference"]["success"]["mean"] == pytest.approx(0.3, abs=0.05)
    assert by_name["rloo"]["difference"]["success"]["above"] == 5
    assert by_name["grpo"]["difference"]["success"]["mean"] == 0
    assert by_name["rloo"]["tasks"].keys() == {"shop", "sql"}
    assert by_name["rloo"]["processor_s"] == 30.0
    assert by_name["dead"]["final"]["success"] is None
    assert {run["status"] for run in by_name["dead"]["runs"]} == {"failed"}


def test_difference_covers_the_tasks_of_both_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep(write(tmp_path, 'seeds = [0, 1, 2, 3, 4]\npresets = ["grpo", "rloo"]\n'), cores=2)
    for run in sweep.runs:
        write_run(run, slope=0.02, ease={"shop": 1.0, "sql": 0.2} if run.variant == "grpo" else {"shop": 1.0})
    both, one = results(sweep, command="agentrl-train sweep sweep.toml", failed={})["variants"]
    assert one["final"]["success"]["mean"] - both["final"]["success"]["mean"] > 0.2
    assert abs(one["difference"]["success"]["mean"]) < 0.1
    assert abs(one["difference"]["greedy"]["mean"]) < 0.05
    assert one["difference"]["area"] is None
    assert both["difference"]["area"]["mean"] == 0.0


def test_dropped_groups_count_as_samples_and_areas_end_at_the_shortest_run(
    found: dict[str, Any],
) -> None:
    by_name = {one["name"]: one for one in found["variants"]}
    assert by_name["grpo"]["samples"] == 16 * STEPS == found["area_samples"]
    assert by_name["dapo"]["samples"] == (16 + 8) * STEPS
    assert by_name["dapo"]["curves"]["held_out_success"]["samples"][1][0] == 24 * 5
    assert by_name["dapo"]["curves"]["held_out_success"]["steps"][1][0] == 5


def test_results_are_json_and_the_page_depends_only_on_them(found: dict[str, Any]) -> None:
    page = render(json.loads(json.dumps(found)))
    assert page == render(found)
    assert "<script" not in page
    assert "the engine &lt;broke&gt;" in page
    assert "agentrl-train sweep sweep.toml" in page
    assert page.count('class="band"') >= 20
    assert "algorithm.preset = &quot;rloo&quot;" in page


def test_many_variants_are_drawn_one_by_one_against_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("grpo", "rloo", "dr_grpo", "dapo", "gspo", "opo", "cispo", "sapo", "dppo", "gmpo")
    slopes = {name: 0.01 + 0.003 * number for number, name in enumerate(names)}
    _, found = make(tmp_path, ", ".join(f'"{name}"' for name in names), slopes=slopes)
    page = render(found)
    assert page.count("<figure") == len(names) - 1
    assert all(f"<b>{name}</b>" in page for name in names[1:])
    drawn = ElementTree.fromstring(figure(found, "held_out_success"))
    labels = [label.text for label in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert labels.count("grpo") == len(names) - 1
    assert all(labels.count(name) == 1 for name in names[1:])


def test_figure_is_a_small_standalone_svg_file(found: dict[str, Any]) -> None:
    text = figure(found, "held_out_success", title="Lock & key")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "Lock &amp; key" in text
    assert "prefers-color-scheme: dark" in text
    assert all(f">{name}</text>" in text for name in ("grpo", "rloo", "dapo"))
    assert len(text) < 10_000
    assert math.isfinite(float(root.attrib["viewBox"].split()[-1]))


def test_long_title_of_a_figure_is_drawn_in_lines_above_the_chart(found: dict[str, Any]) -> None:
    short, long = (
        ElementTree.fromstring(figure(found, "held_out_success", title=title))
        for title in ("Lock", "Household, shop and database: one policy, and three specialists: success")
    )
    title = long.find("{*}text[@class='title']")
    assert title is not None
    lines = title.findall("{*}tspan")
    assert [line.attrib["y"] for line in lines] == ["20", "36"]
    assert all(len(line.text or "") <= 56 for line in lines)
    height, taller = (float(one.attrib["viewBox"].split()[-1]) for one in (short, long))
    assert taller == height + 16


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_fits_the_window_and_its_text_is_readable(
    found: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    from playwright.async_api import async_playwright

    (tmp_path / "report.html").write_text(render(found))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = await context.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto((tmp_path / "report.html").as_uri())
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.locator("figure svg").count() == 10
        colours = "getComputedStyle(document.body)"
        text, ground = [await page.evaluate(f"{colours}.{name}") for name in ("color", "backgroundColor")]
        assert contrast(text, ground) > 7
        assert problems == []
        await browser.close()


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours as defined by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
