"""The HTML of messages, results, sessions and reports in notebooks."""

import re

from agentrl_env import Message, ToolCall
from agentrl_env.testing.report import CheckResult, Report, Verdict
from agentrl_env.types import SessionStatus, StepResult
from tests.env.tasks import Guess


def test_message_shows_its_text_and_calls_escaped():
    shown = Message.assistant("<b>now</b>", ToolCall.of("guess", n=7))._repr_html_()
    assert "&lt;b&gt;now&lt;/b&gt;" in shown
    assert "<b>now" not in shown
    assert "guess({&quot;n&quot;: 7})" in shown
    picture = Message(role="user", content=[{"type": "text", "text": "<i>"}])._repr_html_()
    assert "&lt;i&gt;" in picture


def test_result_shows_reward_and_status():
    said = Message(role="tool", content="higher", tool_call_id="call_0")
    result = StepResult(session_id="s", seq=2, messages=(said,), reward=0.5, status=SessionStatus.RUNNING)
    assert "step 2: reward 0.5, running" in result._repr_html_()
    assert "higher" in result._repr_html_()


def test_session_shows_its_opening_and_tools():
    with Guess.session(seed=1) as session:
        shown = session._repr_html_()
        assert session.messages[0].content.split(".")[0] in shown
        assert re.search("&lt;SyncClientSession .* Tools: .*guess", shown)


def test_report_shows_each_check_escaped():
    facts = {"question": "Are they equal?", "seconds": 0.1, "verdict": Verdict.PASS}
    results = tuple(CheckResult(name=name, evidence="<b>yes</b>", **facts) for name in ("seeds", "limits"))
    shown = Report(task="guess", results=results)._repr_html_()
    assert "seeds" in shown
    assert "limits" in shown
    assert "&lt;b&gt;yes" in shown
