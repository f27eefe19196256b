"""AgentBench's wording: files generated from a checkout, and their effect on each task.

The checkout in these tests has AgentBench's layout but its own sentences.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agentrl_env import ToolCall
from agentrl_env.errors import SandboxUnavailable, TargetError
from agentrl_env.hosting.loader import load_target
from agentrl_env.sandbox.bubblewrap import check_available
from tests.environments import agentbench

pytestmark = pytest.mark.environments

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/agentbench/wording.py"
TASKS = {
    "os_interaction": "os",
    "dbbench": "dbbench",
    "knowledgegraph": "kg",
    "alfworld": "alfworld",
    "webshop": "webshop",
}
EXAMPLE = [
    {"role": "user", "content": "Which {bridge}?"},
    {
        "role": "assistant",
        "content": "It is known.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "count", "arguments": '{"variable":"#0"}'}}
        ],
    },
    {"role": "tool", "content": "Seen: #1", "tool_call_id": "a"},
]
SYSTEM = "ChatCompletionSystemMessageParam(role='system', content={})"
USER = "ChatCompletionUserMessageParam(role='user', content={})"
TOOL = "ChatCompletionToolMessageParam(role='tool', tool_call_id=i, content={})"
SOURCES = {
    "os_interaction/task.py": f"""
        class Task:
            def _inject_initial_messages(self, session, description):
                system_message = '''Rule the {{machine}}.
        Use tools.'''
                session.inject({SYSTEM.format("system_message")})
                session.inject({USER.format("f'Wish {{so}}: {description}'")})

            async def _handle_agent_action(self, session):
                session.inject({USER.format("'A tool, please.'")})
                session.inject({TOOL.format("str(error)")})

            async def _execute_bash_command(self, result):
                result_text = result.output.decode('utf-8')
                if len(result_text) > 800:
                    result_text = result_text[:780] + '<more>'
                session.inject({TOOL.format("f'Printed: {result_text}' if result_text else 'Silence.'")})
        """,
    "dbbench/task.py": f"""
        SYSTEM_PROMPT = 'Ask the database.'

        class Task:
            async def start_sample(self, index, session):
                session.inject({SYSTEM.format("SYSTEM_PROMPT")})
                user_prompt = ''
                if entry['evidence'] != '':
                    user_prompt += 'Known: ' + entry['evidence'] + '\\n'
                if entry['add_description'] != '':
                    user_prompt += 'Tables: ' + entry['add_description'] + '\\n'
                user_prompt += 'Wanted: ' + entry['description'] + '\\n'
                session.inject({USER.format("user_prompt")})
                session.inject({USER.format("'Say it with a tool.'")})
        """,
    "dbbench/interaction.py": """
        class Database:
            async def execute(self, sql):
                raise NotImplementedError

        class MySQLDatabase(Database):
            async def execute(self, sql):
                result_str = str(results)
                if len(result_str) > 800:
                    result_str = result_str[:800] + '<more>'
                return result_str
        """,
    "knowledgegraph/task.py": f"""
        from .const import *

        class Task:
            def sync_start_sample(self, index, session):
                question = item['question']
                session.inject({SYSTEM.format("INSTRUCTIONS.format(max_round=self.max_rounds)")})
                session.inject({USER.format("f'{question} About [{chr(44).join([e for e in entities])}]'")})
                session.inject({USER.format("'Call something.'")})
        """,
    "knowledgegraph/api.py": """
        class API:
            def get_relations(self, variable):
                rtn_str = f"Seen: [{', '.join(out_relations)}]"

            def get_neighbors(self, variable, relation):
                rtn_str = f'Seen: ## of {range_info[relation]}'

            def count(self, variable):
                rtn_str = f'Seen: ## as number'
        """,
    "alfworld/task.py": f"""
        class Task:
            @staticmethod
            def get_task_instruction():
                return 'Keep house.'

            @staticmethod
            def get_available_actions(actions):
                actions = '\\n'.join(actions)
                return ' Choices: ' + actions + '\\n'

            def alfworld_run(self, session, env):
                ob = '\\n'.join(ob[0].split('\\n\\n')[1:])
                log_info = {{}}
                session.inject({SYSTEM.format("self.get_task_instruction()")})
                init_prompt = 'To do. ' + ob + self.get_available_actions(info['commands'][0])
                log_info['init_prompt'] = init_prompt
                session.inject({USER.format("init_prompt")})
                for i in range(9):
                    session.inject({USER.format("'Do something.'")})
                    session.inject({USER.format("'Do it well.'")})
                    observation, reward = env.step(action)
                    session.inject({TOOL.format("observation + self.get_available_actions(info['now'])")})
        """,
    "webshop/task.py": f"""
        prompt_with_max_turn = '''
        Go shopping.
        '''

        class Task:
            def sync_start_sample(self, index, session):
                session.inject({SYSTEM.format("prompt_with_max_turn")})
                observation = env.observation
                for j in range(9):
                    if j == 0:
                        session.inject({USER.format("f'First: {observation} Do {available_actions}'")})
                    elif action is None:
                        session.inject({USER.format("f'Now: {observation} Do {available_actions}'")})
                    else:
                        session.inject({TOOL.format("f'{action} Now: {observation} Do {available_actions}'")})
                    if not tool_calls:
                        observation = 'Use a tool.'
                    observation, reward = env.step(action)
        """,
}
MESSAGES = {
    "os_interaction": "Rule the {machine}.\nUse tools.",
    "dbbench": "Ask the database.",
    "knowledgegraph": "Within 15 steps, {see}.",
    "alfworld": "Keep house.",
    "webshop": "\nGo shopping.\n",
}
TEXTS = {
    "os_interaction": {
        "opening": "Wish {{so}}: {question}",
        "output": "Printed: {output}",
        "no_output": "Silence.",
        "cut": "<more>",
        "no_tool_call": "A tool, please.",
    },
    "dbbench": {
        "opening": "{evidence}{notes}Wanted: {question}\n",
        "evidence": "Known: {evidence}\n",
        "notes": "Tables: {notes}\n",
        "result": "{rows}",
        "no_rows": "{rows}",
        "changed": "{rows}",
        "cut": "<more>",
        "no_tool_call": "Say it with a tool.",
    },
    "knowledgegraph": {
        "opening": "{question} About [{entities}]",
        "names": "Seen: [{names}]",
        "variable": "Seen: #{number} of {type}",
        "count": "Seen: #{number} as number",
        "no_tool_call": "Call something.",
    },
    "alfworld": {
        "opening": "To do. {observation} Choices: {actions}\n",
        "reply": "{observation} Choices: {actions}\n",
        "no_tool_call": "Do something.",
    },
    "webshop": {
        "opening": "First: {observation} Do {available_actions}",
        "page": "{action} Now: {observation} Do {available_actions}",
        "refused": "{action} Now: {observation} Do {available_actions}",
        "no_tool_call": "Now: Use a tool. Do {available_actions}",
    },
}


@pytest.fixture(scope="module")
def tools():
    """Return the tools of each task with the descriptions of these tests."""
    invented = {}
    for name in TASKS:
        specs = [
            spec.model_dump(mode="json")
            for spec in load_target(str(ROOT / "environments" / name)).tool_specs()
        ]
        for spec in specs:
            function = spec["function"]
            function["description"] = f"{{{function['name']}}} works."
            for argument, schema in function["parameters"]["properties"].items():
                schema["description"] = f"An {argument}."
        invented[name] = specs
    return invented


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, tools):
    """Return the folder of a checkout with AgentBench's layout."""
    folder = tmp_path_factory.mktemp("checkout")
    sources = {path: dedent(text) for path, text in SOURCES.items()}
    sources["knowledgegraph/const.py"] = (
        "INSTRUCTIONS = 'Within {max_round} steps, {{see}}.'\n"
        f"TOOLS = {tools['knowledgegraph']!r}\nONE_SHOT = {EXAMPLE!r}\n"
    )
    for path, text in sources.items():
        file = folder / "src/server/tasks" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (folder / "configs/tasks").mkdir(parents=True)
    for name, short in TASKS.items():
        default = {"max_rounds": 15, "one_shot": False, "tools": tools[name]}
        sections = {
            "default": {"parameters": default},
            f"{short}-std": {"parameters": {"one_shot": True}},
            f"{short}-env_train": {"parameters": {}},
        }
        (folder / f"configs/tasks/{short}.yaml").write_text(json.dumps(sections), encoding="utf-8")
    return folder


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def files(checkout, tmp_path_factory):
    """Return the file of each task as generated by the script, which also prints the settings."""
    folder = tmp_path_factory.mktemp("wording")
    done = run(checkout, folder)
    assert (done.returncode, done.stderr) == (0, "")
    paths = {name: folder / f"{name}.json" for name in TASKS}
    assert done.stdout.splitlines() == [
        f"export {name.upper()}_WORDING={path}" for name, path in paths.items()
    ]
    return paths


@pytest.fixture
def reworded(files, tmp_path, monkeypatch):
    """Return a function that loads a task with its wording file, in its own folder."""
    monkeypatch.setenv("WEBSHOP_PRODUCTS", "300")

    def load(name, path=None, **settings):
        monkeypatch.setenv(f"{name.upper()}_WORDING", str(path or files[name]))
        for setting, value in settings.items():
            monkeypatch.setenv(setting, value)
        return load_target(str(shutil.copytree(ROOT / "environments" / name, tmp_path / name)))

    return load


@pytest.mark.parametrize("name", TASKS)
def test_checkout_becomes_a_file_for_each_task(files, tools, name):
    wording = json.loads(files[name].read_text(encoding="utf-8"))
    examples = EXAMPLE if name == "knowledgegraph" else []
    assert wording["messages"] == [{"role": "system", "content": MESSAGES[name]}, *examples]
    assert wording["tools"] == tools[name]
    assert wording["texts"] == TEXTS[name]


@pytest.mark.parametrize("name", TASKS)
def test_task_accepts_its_file_and_serves_its_tools_byte_for_byte(reworded, tools, name):
    task = reworded(name)
    served = [spec.model_dump(mode="json") for spec in task.tool_specs()]
    assert json.dumps(served) == json.dumps(tools[name])
    assert task.wording.text("no_tool_call", available_actions="x") == TEXTS[name]["no_tool_call"].format(
        available_actions="x"
    )


def test_training_split_has_no_example(checkout, tmp_path):
    assert run(checkout, tmp_path, "--split", "env_train").returncode == 0
    assert len(json.loads((tmp_path / "knowledgegraph.json").read_text())["messages"]) == 1


def test_checkout_of_another_version_is_rejected_with_the_missing_parts(checkout, tmp_path):
    other = shutil.copytree(checkout, tmp_path / "other")
    source = other / "src/server/tasks/dbbench/interaction.py"
    source.write_text(source.read_text().replace("result_str", "text"))
    done = run(other, tmp_path / "files")
    assert done.returncode == 1
    assert "interaction.py lacks the variable result_str in the function execute" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "files").exists()
    (other / "configs/tasks/os.yaml").write_text("{default: {parameters: {}}, os-std: {parameters: {}}}")
    assert "os.yaml lacks 'tools'" in run(other, tmp_path / "files").stderr
    assert "cannot read" in run(tmp_path / "absent", tmp_path).stderr


def test_file_of_another_task_is_refused_when_the_task_loads(reworded, files):
    with pytest.raises(
        TargetError, match=r"os_interaction\.json does not fit the task: it has a text 'no_output'"
    ):
        reworded("dbbench", files["os_interaction"])


def contents(messages):
    return [message.content for message in messages]


def test_dbbench_uses_the_wording_of_its_file(reworded):
    task = reworded("dbbench")
    record = {
        "description": "How many?",
        "evidence": "All count.",
        "add_description": "t has a and b.",
        "table": {
            "table_name": "t",
            "table_info": {
                "columns": [{"name": "a"}, {"name": "b"}],
                "rows": [[f"word {n}", None] for n in range(99)],
            },
        },
        "label": ["99"],
        "type": ["other"],
    }
    with task.session(sample={"record": record}) as session:
        assert contents(session.messages) == [
            "Ask the database.",
            "Known: All count.\nTables: t has a and b.\nWanted: How many?\n",
        ]

        def answer(query):
            return session.step(ToolCall.of("execute_sql", query=query)).messages[0].content

        assert answer("SELECT * FROM t LIMIT 2") == "[('word 0', None), ('word 1', None)]"
        assert answer("SELECT * FROM t WHERE a = 'x'") == "[]"
        assert answer("DELETE FROM t WHERE a = 'x'") == "[]"
        listed = answer("SELECT * FROM t")
        assert listed.startswith("[('word 0', None), ")
        assert listed.endswith("<more>")
        assert len(listed) == 800 + len("<more>")
        assert contents(session.step("So?").messages) == ["Say it with a tool."]
    with task.session(index=0) as session:  # a generated problem has no notes but names its tables
        assert "\nTables: Table " in f"\n{session.messages[1].content}"


def test_os_interaction_uses_the_wording_of_its_file(reworded):
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    problem = {"question": "Why?", "answer": "so", "official": True}
    with reworded("os_interaction").session(sample={"problem": problem}) as session:
        assert contents(session.messages) == [MESSAGES["os_interaction"], "Wish {so}: Why?"]

        def answer(script):
            return session.step(ToolCall.of("bash_action", script=script)).messages[0].content

        assert answer("echo {x}") == "Printed: {x}"
        assert answer("cat /nope").startswith("Printed: cat: /nope:")
        assert "exit code" not in answer("cat /nope")
        assert answer("false") == "Silence."
        assert answer("printf %800s x").endswith(" x")
        assert answer("printf %0801d 1") == f"Printed: {'0' * 780}<more>"
        assert contents(session.step("So?").messages) == ["A tool, please."]


def test_knowledgegraph_uses_the_wording_of_its_file(reworded):
    task = reworded("knowledgegraph")
    task.stores[""] = lambda query: ["music.band.members", "music.band.albums"]
    question = {"question": "Who?", "entities": {"Ann": "m.01", "Bo": "m.02"}, "answer": []}
    with task.session(sample=question) as session:
        system, *example, opening = session.messages
        assert system.content == MESSAGES["knowledgegraph"]
        assert [message.model_dump(mode="json") for message in example] == EXAMPLE
        assert opening.content == "Who? About [Ann, Bo]"

        def answer(name, **arguments):
            return session.step(ToolCall.of(name, **arguments)).messages[0].content

        assert answer("get_relations", variable="Ann") == "Seen: [music.band.albums, music.band.members]"
        made = answer("get_neighbors", variable="Ann", relation="music.band.members")
        assert made == "Seen: #0 of music.band.members"
        assert answer("count", variable="#0") == "Seen: #1 as number"
        assert contents(session.step("So?").messages) == ["Call something."]


def test_webshop_uses_the_wording_of_its_file(reworded):
    with reworded("webshop").session(index=0) as session:
        wish = session.info.sample.data["instruction"]
        assert contents(session.messages) == [
            "\nGo shopping.\n",
            f"First: WebShop [SEP] Instruction: [SEP] {wish} [SEP] Search "
            "Do {'has_search_bar': True, 'clickables': ['search']}",
        ]
        refused = session.step(ToolCall.of("click_action", value="Buy Now")).messages[0].content
        assert refused.startswith("click[Buy Now] Now: WebShop [SEP] Instruction: [SEP] ")
        found = session.step(session.expert()).messages[0].content
        assert f"[SEP] {wish} [SEP] Back to Search [SEP] Page 1 (Total results: " in found
        assert "{'has_search_bar': False, 'clickables': ['back to search', " in found
        assert contents(session.step("So?").messages)[0].startswith(
            "Now: Use a tool. Do {'has_search_bar': False"
        )


def test_alfworld_uses_the_wording_of_its_file(reworded):
    with reworded("alfworld").session(index=0) as session:
        system, opening = contents(session.messages)
        assert system == "Keep house."
        assert opening.startswith("To do. You are in the middle of a room. ")
        assert "\nYour task is to: " in opening
        assert "\n\n" not in opening
        assert " Choices: " in opening
        assert opening.endswith("look\n")
        reply = session.step(session.expert()).messages[0].content
        assert " Choices: " in reply
        assert reply.endswith("\n")
        assert contents(session.step("So?").messages) == ["Do something."]


def test_records_of_agentbench_open_with_the_wording_of_the_file(reworded):
    path = agentbench.folder("dbbench") / "dev.jsonl"
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    with reworded("dbbench", DBBENCH_DATA=str(path)).session(split="dev", index=0) as session:
        told = f"Tables: {record['add_description']}\nWanted: {record['description']}\n"
        assert contents(session.messages) == ["Ask the database.", told]
    check_available()
    folder = agentbench.folder("os_interaction")
    record = json.loads((folder / "data/dev.json").read_text(encoding="utf-8"))[0]
    with reworded("os_interaction", OS_INTERACTION_DATA=str(folder)).session(split="dev", index=0) as session:
        assert session.messages[1].content == f"Wish {{so}}: {record['description']}"


def test_original_agentbench_becomes_files_that_the_tasks_accept(reworded, tmp_path):
    checkout = agentbench.folder("dbbench").parents[1]
    if not (checkout / "src/server/tasks").is_dir():
        pytest.skip("AGENTBENCH_DATA is not the data folder of a whole checkout")
    done = run(checkout, tmp_path / "files")
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location(
        "const", checkout / "src/server/tasks/knowledgegraph/const.py"
    )
    const = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(const)
    for name in TASKS:
        path = tmp_path / f"files/{name}.json"
        written = json.loads(path.read_text(encoding="utf-8"))
        served = [tool.model_dump(mode="json") for tool in reworded(name, path).tool_specs()]
        assert json.dumps(served) == json.dumps(written["tools"])
    graph = load_target(str(tmp_path / "knowledgegraph"))
    system, *example, _ = graph.wording.opening(question="Who?", entities="Ann")
    assert system.content == const.INSTRUCTIONS.format(max_round=15)
    assert [message.model_dump(mode="json") for message in example] == const.ONE_SHOT
