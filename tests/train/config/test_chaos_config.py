"""The configuration of the chaos runs. The runs are too long for the quick tests."""

import tomllib

from agentrl_train.config.loading import validate_table
from tests.chaos.site import TASKS_FILE
from tests.chaos.training_site import CONFIG


def test_configuration_of_the_chaos_runs_is_valid(tmp_path):
    values = {"folder": tmp_path, "url": "http://127.0.0.1:1", "tasks": TASKS_FILE}
    (tmp_path / "model").mkdir()
    text = CONFIG.format(per_step=4, group_size=2, learning_rate=0.001, **values)
    config = validate_table(tomllib.loads(text), base=tmp_path, failure="invalid")
    assert config.rollout.environment_retries == 4
