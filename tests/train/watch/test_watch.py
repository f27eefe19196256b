"""The live page over HTTP for a run folder that is still being written."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agentrl_env.errors import ServeError
from agentrl_train.batch import sequences
from agentrl_train.errors import RunFolderError
from agentrl_train.report.curves import CURVES
from agentrl_train.storage.journal import Journal
from agentrl_train.telemetry.metrics import MetricsLog, readable
from agentrl_train.watch import episodes
from agentrl_train.watch import run as watched
from agentrl_train.watch.app import WatchServer, create_app
from agentrl_train.watch.run import GrowingFile
from tests.train.telemetry.test_metrics import make_group

EVIL = "<script>window.hit = 1</script>"
TOKEN = "a-token-with-16-characters"


@pytest.fixture(autouse=True)
def _always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "REFRESH_S", 0.0)


def write_step(folder: Path, step: int, task: str = "shop") -> None:
    log = MetricsLog(folder, first_step=step - 1)
    group = make_group(step, task)
    values = {"tokens_of_age_0": 4.0, "tokens_of_age_1": 2.0}
    log.log_step(
        step,
        policy_version=step,
        elapsed_s=float(step),
        metrics=values,
        tasks={task: {"success": 0.5, "reward": 0.5}},
        groups=[group],
        rows=sequences([group], [[-1.0, 2.0, 0.5]]),
    )
    log.close()


@pytest.fixture
def client() -> Callable[..., TestClient]:
    def client(*folders: Path, token: str | None = None) -> TestClient:
        return TestClient(create_app(folders, token=token), base_url="http://127.0.0.1")

    return client


def test_curves_and_episodes_grow_with_the_run(tmp_path: Path, client: Callable[..., TestClient]):
    run = tmp_path / "night"
    page = client(run)
    assert "does not exist yet" in page.get("/data/overview").text
    write_step(run, 1)
    assert "2 episodes" in page.get("/data/episodes").text
    write_step(run, 2, "sql")
    assert "4 episodes" in page.get("/data/episodes").text
    assert "step 2" in page.get("/data/overview").text
    assert "Age of tokens" in page.get("/data/curves").text
    assert "2 episodes" in page.get("/data/episodes?task=sql").text
    assert "1 episode" in page.get("/data/episodes?task=sql&lowest=0.9").text


def test_tokens_have_log_probability_advantage_and_version(tmp_path: Path, client: Callable[..., TestClient]):
    write_step(tmp_path, 1)
    page = client(tmp_path)
    rows = re.findall(r'data-load="([^"]+)"', page.get("/data/episodes?order=highest").text)
    text = page.get(f"/data/{unescape(rows[0])}").text
    assert [json.loads(unescape(one)) for one in re.findall(r'data-t="([^"]+)"', text)] == [
        [-0.1, 2.0, 3.0, 5.0],
        [-0.2, 2.0, 3.0, 6.0],
        [-0.3, 2.0, 4.0, 7.0],
    ]


def test_group_appears_when_it_finishes_and_once_when_it_is_trained(
    tmp_path: Path, client: Callable[..., TestClient]
):
    write_step(tmp_path, 1)
    page = client(tmp_path)
    journal = Journal(tmp_path / "journal")
    journal.append(make_group(2, "shop"))
    assert "3 episodes" in page.get("/data/episodes?kind=waiting").text
    write_step(tmp_path, 2)
    assert "0 episodes" in page.get("/data/episodes?kind=waiting").text
    assert "3 episodes" in page.get("/data/episodes?first_step=2").text
    journal.close()


def test_text_of_models_is_escaped_and_scripts_are_forbidden(
    tmp_path: Path, client: Callable[..., TestClient]
):
    group = make_group(1, EVIL)
    group = replace(group, trajectories=[replace(one, error=EVIL) for one in group.trajectories])
    log = MetricsLog(tmp_path)
    log.log_step(
        1, policy_version=1, elapsed_s=1.0, metrics={}, tasks={EVIL: {"success": 1.0}}, groups=[group]
    )
    log.close()
    page = client(tmp_path)
    listed = page.get("/data/episodes").text
    (first, *_) = re.findall(r'data-load="([^"]+)"', listed)
    texts = [listed, *(page.get(f"/data/{one}").text for one in ("curves", "overview", unescape(first)))]
    assert all("<script" not in text for text in texts)
    assert any("&lt;script&gt;" in text for text in texts)
    assert "default-src 'none'; script-src 'self'" in page.get("/").headers["content-security-policy"]


def test_data_requires_the_token(tmp_path: Path, client: Callable[..., TestClient]):
    write_step(tmp_path, 1)
    page = client(tmp_path, token=TOKEN)
    assert page.get("/").status_code == 200
    assert tmp_path.name not in page.get("/").text
    assert page.get("/data/overview").status_code == 401
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert tmp_path.name in page.get("/data/overview", headers=headers).text


@pytest.mark.parametrize("key", ["", "[]", '["../../secret", 0, 0]', '["step_000001.jsonl", 99, 0]'])
def test_keys_cannot_reach_other_files(tmp_path: Path, client: Callable[..., TestClient], key: str):
    write_step(tmp_path, 1)
    answer = client(tmp_path).get("/data/episode", params={"key": key})
    assert answer.status_code == 422 or "no longer on disk" in answer.text


def test_two_runs_are_compared_in_the_same_charts(tmp_path: Path, client: Callable[..., TestClient]):
    for name in ("a", "b"):
        write_step(tmp_path / name, 1)
    page = client(tmp_path / "a", tmp_path / "b")
    text = page.get("/data/curves").text
    assert "Solid: a. Dashed: b." in text
    assert 'class="c0 dashed"' in text
    assert page.get("/data/episodes?run=2").status_code == 422


def test_page_beyond_loopback_needs_a_token_and_names_only_its_own_options(tmp_path: Path):
    with pytest.raises(ServeError, match="give --token-file") as raised:
        WatchServer([tmp_path], host="0.0.0.0", port=0, token=None)
    assert "insecure" not in str(raised.value)


def test_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "letter.txt").write_text("hello")
    with pytest.raises(RunFolderError, match="has none of config"):
        create_app([tmp_path])


def test_line_is_read_when_complete_and_again_after_a_resume(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    path.write_text('{"step": 1}\n{"step": ')
    assert file.read()
    assert file.records == [{"step": 1}]
    with open(path, "a") as more:
        more.write('2}\n{"step": 3}\n')
    assert file.read()
    assert not file.read()
    assert [one["step"] for one in file.records] == [1, 2, 3]
    path.write_text('{"step": 1}\n{"step": 2, "again": true}\n')
    assert file.read()
    assert file.records == [{"step": 1}, {"step": 2, "again": True}]


def test_compressed_files_are_read(tmp_path: Path, client: Callable[..., TestClient]):
    write_step(tmp_path, 1)
    for path in (tmp_path / "metrics.jsonl", tmp_path / "trajectories" / "step_000001.jsonl"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    page = client(tmp_path)
    assert "step 1" in page.get("/data/overview").text
    assert "2 episodes" in page.get("/data/episodes").text
    shutil.rmtree(tmp_path / "trajectories")
    assert "0 episodes" in page.get("/data/episodes").text


LONG = 10_000
KB = 1000


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 10,000 steps on three tasks, with 100 episodes in each of the last 1,000 steps."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "config.toml").write_text(f"[run]\nsteps = {LONG}\n")
    names = [name for curve in CURVES for name in curve.names]
    values = {name: 0.123456 for name in [*names, "tokens_of_age_0", "tokens_of_age_1"]}
    tasks = {task: values for task in ("shop", "sql", "household")}
    lines = (json.dumps({**values, "step": step, "tasks": tasks}) for step in range(1, LONG + 1))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    group = make_group(0, "shop")
    episode = json.dumps(readable(group.trajectories[0], group) | {"messages": []}) + "\n"
    (folder / "trajectories").mkdir()
    for step in range(LONG - 999, LONG + 1):
        (folder / "trajectories" / f"step_{step:06d}.jsonl").write_text(episode * 100)
    return folder


def test_answers_stay_small_at_10_000_steps_and_100_000_episodes(
    long_run: Path, client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(episodes, "BUDGET_S", float("inf"))
    page = client(long_run)
    answers = {name: page.get(f"/data/{name}") for name in ("about", "overview", "curves", "episodes")}
    assert "step 10,000 of 10,000" in answers["overview"].text
    assert "100,000 episodes · page 1 of 5,000" in answers["episodes"].text
    assert "Each point is the mean of 64 steps" in answers["curves"].text
    sizes = {name: len(answer.content) for name, answer in answers.items()}
    assert sizes["curves"] < 1000 * KB
    assert all(size < 30 * KB for name, size in sizes.items() if name != "curves")
    with page.stream("GET", "/data/curves", headers={"accept-encoding": "gzip"}) as compressed:
        assert sum(map(len, compressed.iter_raw())) < 150 * KB
    last = page.get("/data/episodes?page=4999")
    assert "page 5,000 of 5,000" in last.text
    assert len(last.content) < 30 * KB
    tag = answers["curves"].headers["etag"]
    again = page.get("/data/curves", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
