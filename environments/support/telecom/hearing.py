"""Understanding: the uses of a phone that a message of the desk requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..device import Use
from .records import ACCESS_POINT

MAX_HEARD = 2_000
"""Maximum number of characters of a message that the customer reads. Longer ones would be slow to search."""
_SETTINGS = {
    "airplane mode": r"\b(?:air|aero)plane\b(?:[- ]mode)?|\bflight[- ]mode",
    "data roaming": r"\b(?:mobile )?(?:data )?(?:international )?roaming\b",
    "data saver": r"\b(?:mobile )?data[- ]sav(?:er|ing)\b(?:[- ]mode)?|\blow[- ]data[- ]mode",
    "VPN": r"\bvpns?\b|\bvirtual private network\b",
    "Wi-Fi calling": r"\bwi-?fi[- ]calling\b|\bcalls over wi-?fi\b",
    "access point": r"\bapns?\b|\baccess[- ]points?\b(?:[- ]names?)?",
    "network selection": r"\b(?:network|operator|carrier|provider)[- ](?:selection|choice|search)\b"
    r"|\b(?:select|choos|pick)\w*\s+(?:the |a |your )?(?:mobile )?(?:network|operator|carrier|provider)\b"
    r"(?![- ](?:mode|type))"
    r"|\b(?:network|operator|carrier|provider)\b(?: is| be)? (?:selected|chosen|set)\b",
    "network mode": r"\b(?:preferred |mobile )?network[- ](?:mode|type)\b|\b[2-5] ?g\b|\blte\b",
    "mobile data": r"\b(?:mobile|cellular)[- ]data\b(?! (?:plan|allowance|volume|usage|limit))",
    "SIM lock": r"\bsim\b(?:(?!\b(?:and|or)\b)[^,.;?!]){0,40}?\b(?:locked|unlocked|puk|pin)\b"
    r"|\bsim[- ]lock\b|\bpuk\b|\bpin\b|\bunlock\b",
    "SIM card": r"(?<!new )(?<!old )\bsim\b(?:[- ](?:card|tray))?",
}
_MENTION = re.compile("|".join(f"(?P<s{n}>{pattern})" for n, pattern in enumerate(_SETTINGS.values())))
_SIM_ORDER = re.compile(r"\b(?:send|sent|order\w*|deliver\w*|address|replac\w*|lost|damaged)\b")
_NAMES = tuple(_SETTINGS)
_CHOICES = ("network selection", "network mode", "access point")
_PLAIN = (*_CHOICES, "SIM card", "SIM lock")
"""The settings that are not switched on and off."""
_ON_OFF = {"on": "on", "enabled": "on", "off": "off", "disabled": "off"}
_ENDS_SWITCHED = re.compile(r"\b(on|off|enabled|disabled)[^\w?]*$")
_NOT_ASKED = re.compile(
    r"\b(?:should|shall|may|can|could) (?:i|we)\b(?! ask)|\bwould you like\b|\bdo you want\b|\bgo ahead\b"
)
"""Words of a sentence about the desk's own actions."""
_IF_IT_FAILS = re.compile(
    r"\bif (?:(?:it|that|this|the (?:problem|internet|service|phone))(?: still)? "
    r"(?:does not|doesn't|did not|didn't|fails|is (?:still|not working)|isn't working|persists|remains)"
    r"|there is still|you still|nothing)"
)
_IF_NOT = re.compile(r"^(?:and )?(?:if not|otherwise|or else)\b")
_LEAVE = re.compile(r"\b(?:leave|keep|do not|don't|never|no need|need not|without|instead of|rather than)\b")
_LOOK = re.compile(
    r"\b(?:check|look|see|tell me|let me know|verify|confirm|find|report|read|open|go to|try|test|make sure"
    r"|ensure)\b"
)
_SHOWN = re.compile(
    r"\bstatus bar\b|\btop of (?:the|your) (?:screen|phone|display)\b|\berror message\b|\b(?:symbol|icon)s?\b"
    r"|\bwhat (?:do|does|can) (?:you|it|(?:the|your) (?:phone|screen|display)) (?:see|show|say|display)"
)
_RESTART = re.compile(
    r"\b(?:restart|reboot|power[- ]cycle)\b"
    r"|\b(?:turn|switch|power) (?:the|your) (?:\w+ )?(?:phone|device|handset)\b.{0,30}?\boff\b"
    r"|\b(?:turn|switch|power) off (?:the|your) (?:\w+ )?(?:phone|device|handset)\b"
)
_TEST = re.compile(
    r"\b(?:works?|working|try|test|fixed|solved|resolved|better|faster|slow|back|service|signal|reception|bars"
    r"|internet|online|connect\w*|calls?|browse|web ?(?:page|site)s?|speed)\b"
)
_SURE_TEST = re.compile(r"\b(?:works?|working|try|test|fixed|solved|resolved)\b")
_PRONOUN = re.compile(r"\b(?:it|this|that|them|these|both)\b")
_FILLERS = re.compile(
    r"\b(?:and|or|also|then|next|please|the|your|on the phone|too|as well|settings?|both|first|now|is|are)\b"
    r"|[\W\d_]+"
)
_THEM = r"(?:(?:it|this|that|them|these|both)\s+)?"
_BETWEEN = r"(?:(?!(?:if|is|are|whether|on|off|and|then)\b)[\w'’-]+\s+){1,5}?"
_AFTER = r"(?!\s+(?:your|the|this|that|my|its|a)\b)"
_ALSO = r"(?:\s*(?:,|and|then)+\s*(?:then\s+)?(?:back\s+)?(?P<again>on|off)\b)?"
_CHANGES = (
    re.compile(
        rf"\b(?:turn|switch|toggle|put|set|flip|try (?:turn|switch)ing)\s+{_THEM}(?:back\s+)?"
        rf"(?P<value>on|off)\b{_ALSO}"
    ),
    re.compile(rf"\b(?:turn|switch|toggle|put|set)\s+{_BETWEEN}(?P<value>on|off)\b{_AFTER}{_ALSO}"),
    re.compile(r"\b(?P<value>enable|activate|(?<=try )(?:enabl|activat)ing)\b"),
    re.compile(r"\b(?P<value>disable|deactivate|(?<=try )(?:disabl|deactivat)ing)\b"),
    re.compile(
        r"\b(?:make sure|be sure|ensure)\b[^,;]*?\b(?:is|are|be)\s+(?:\w+\s+)?"
        r"(?P<value>on|off|enabled|disabled)\b"
    ),
    re.compile(
        r"\b(?:must|should|has to|have to|needs to) be (?:\w+\s+)?(?P<value>on|off|enabled|disabled)\b"
    ),
)
_SET = re.compile(
    r"\b(?:set|change|switch|turn|choose|select|pick|use|put|enter|type|write|correct|update|edit|adjust"
    r"|configure|move|enable|activate|disable|reset|restore|make sure|ensure)\b"
)
_MUST_BE = re.compile(r"\b(?:must|should|has to|needs to) (?:be|read|say)\b")
_IS_SET = re.compile(r"\b(?:is|are|was|been|it's|currently)\b(?:\s+[\w'’-]+){0,4}\s*$")
_TAKE_OUT = re.compile(
    r"\b(?:take|pull|slide|pop|get)\b[^.;]{0,40}?\bout\b|\b(?:remove|eject|reseat|re-seat|reinsert|re-insert)\b"
)
_PUT_IN = re.compile(
    r"\b(?:put|push|slide|pop)\b[^.;]{0,40}?\b(?:back|in|into|again)\b"
    r"|\b(?:reseat|re-seat|insert|reinsert|re-insert)\b"
)
_CODE = re.compile(r"\b\d{4}[ -]?\d{4}\b")
_CODE_WORDS = r"\b(?:puk|pin|codes?|unlock|locked)\b"
_NAME = re.compile(r"\b[a-z0-9-]{2,}(?:\.[a-z0-9-]{2,})+\b")


def understand(messages: Sequence[str]) -> list[Use]:
    """Return the uses that the last of some messages requests: changes, looks, a restart and a test."""
    uses: list[Use] = []
    end: list[Use] = []
    last, act, tested = _last_setting(messages[:-1]), "", False
    message = messages[-1][:MAX_HEARD].lower()
    for sentence in _sentences(message):
        if _NOT_ASKED.search(sentence) or _IF_IT_FAILS.search(sentence):
            continue
        if tested and _IF_NOT.search(sentence):
            continue
        question = sentence.endswith("?") or _is_told(_LOOK, sentence)
        parts = list(_parts(sentence, last))
        named = bool(_MENTION.search(sentence))
        tested = question and bool((_SURE_TEST if named else _TEST).search(sentence))
        if code := _CODE.search(sentence) if re.search(_CODE_WORDS, message) else None:
            uses.append(("enter_puk", {"code": re.sub(r"\D", "", code[0])}))
            parts = [(text, setting) for text, setting in parts if setting not in ("SIM lock", "SIM card")]
        if tested and not named:  # "Does it work?" is not about the last setting
            parts, act = [], ""
        for text, setting in parts:
            last = setting or last
            made, act = _act(text, setting, question, act)
            uses += made
        if _is_told(_RESTART, sentence) and not _LEAVE.search(sentence):
            end.append(("restart", {}))
        if question and not named and _SHOWN.search(sentence):
            uses.append(("look_at_screen", {}))
        elif tested:
            end.append(("test_service", {}))
    return _once([*uses, *sorted(end, key=lambda use: use[0])])


def _once(uses: Sequence[Use]) -> list[Use]:
    """Return the uses without repetitions, and without looks at settings that are also changed."""
    changed = [given["setting"] for name, given in uses if name == "change"]
    kept: list[Use] = []
    for name, given in uses:
        if (name == "look" and given["setting"] in changed) or (name, given) in kept[-1:]:
            continue
        if name not in ("look", "restart", "test_service", "look_at_screen") or (name, given) not in kept:
            kept.append((name, given))
    return kept


def _sentences(message: str) -> list[str]:
    parts = re.split(r"(?<=[.?!;])\s+|\n+|\s+[–—-]\s+", message.replace("’", "'"))
    return [part.strip() for part in parts if not re.fullmatch(r"\W*(?:\d\d?[.)])?\W*", part)]


def _last_setting(messages: Sequence[str]) -> str | None:
    """Return the setting that was mentioned last, to which a pronoun refers."""
    for message in reversed(messages):
        if found := [_name(match) for match in _MENTION.finditer(message[:MAX_HEARD].lower())]:
            return found[-1]
    return None


def _name(match: re.Match[str]) -> str:
    return _NAMES[int(str(match.lastgroup)[1:])]


def _parts(sentence: str, last: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the parts of a sentence with one setting each. Yield None if it is about no setting."""
    found = [(match.start(), match.end(), _name(match)) for match in _MENTION.finditer(sentence)]
    if _SIM_ORDER.search(sentence):
        found = [mention for mention in found if mention[2] != "SIM card"]
    found = [mention for n, mention in enumerate(found) if n == 0 or mention[2] != found[n - 1][2]]
    if not found:
        yield sentence, last if last and _PRONOUN.search(sentence) else None
        return
    start = 0
    for number, (_, end, setting) in enumerate(found):
        after = found[number + 1][0] if number + 1 < len(found) else len(sentence)
        between = [
            match.start() for match in re.finditer(r",|\b(?:and|or|then|but)\b|/", sentence[end:after])
        ]
        # The last conjunction before the next setting starts the next part.
        stop = len(sentence) if number + 1 == len(found) else end + (between[-1] if between else 0)
        yield sentence[start:stop], setting
        start = stop


def _act(text: str, setting: str | None, question: bool, before: str) -> tuple[list[Use], str]:
    """Return the uses that a part of a sentence requests, and its act, which the next part can share.

    An act is "on", "off", "look" or "".
    """
    if setting is None:
        return [], "look" if question else _switched(text, question)
    if _LEAVE.search(text):
        return [], ""
    if setting == "SIM card":
        told = [("remove_sim", _TAKE_OUT), ("insert_sim", _PUT_IN)]
        if made := [(name, {}) for name, pattern in told if _is_told(pattern, text)]:
            return made, ""
    elif setting in _CHOICES:
        if value := _chosen(text, setting, question):
            return [("change", {"setting": setting, "value": value})], ""
    elif value := _switched(text, question):
        return [("change", {"setting": setting, "value": value})], value
    bare = not _FILLERS.sub("", _MENTION.sub("", text))
    if bare and before in ("on", "off") and setting not in _PLAIN:
        return [("change", {"setting": setting, "value": before})], before
    value = _ENDS_SWITCHED.search(text)
    if value and before in ("on", "off") and setting not in _PLAIN and not _LOOK.search(text):
        return [("change", {"setting": setting, "value": _ON_OFF[value[1]]})], _ON_OFF[value[1]]
    if question or (bare and before == "look"):
        return [("look", {"setting": setting})], "look"
    return [], before if bare else ""


def _is_told(pattern: re.Pattern[str], text: str) -> bool:
    return any(_by_customer(text[: match.start()]) for match in pattern.finditer(text))


def _by_customer(before: str) -> bool:
    """Return True if the next words are a request to the customer, not about others or the past."""
    people = re.findall(r"\b(?:i|we|me|you)\b", before)
    if people and people[-1] != "you":
        return False
    if re.search(r"\b(?:did|do|have|had|has|were|are) you\b[^,;]*$", before):
        return False
    return bool(people) or not re.search(r"\b(?:will|would|does|might)\s*$", before)


def _switched(text: str, question: bool) -> str:
    """Return "on" or "off" if a text requests a switch, or the last of several."""
    found = []
    for pattern in _CHANGES:
        for match in pattern.finditer(text):
            must = pattern is _CHANGES[-1]
            if question if must else not _by_customer(text[: match.start()]):
                continue
            value = match.groupdict().get("again") or match["value"]
            found.append((match.end(), "on" if value in ("on",) or value[0] in "ea" else "off"))
    return max(found)[1] if found else ""


def _chosen(text: str, setting: str, question: bool) -> str:
    """Return the value that a text tells the customer to choose, or "" for none."""
    verbs = [
        match
        for match in _SET.finditer(text)
        if _by_customer(text[: match.start()])
        and not (match[0] in ("set", "put") and _IS_SET.search(text[: match.start()]))
    ]
    if not verbs and (question or not _MUST_BE.search(text)):
        return ""
    if setting == "access point":
        if name := _NAME.search(text):
            return name[0]
        return ACCESS_POINT if re.search(r"\breset\b|\bdefault\b", text) else ""
    if setting == "network mode":
        wanted = re.search(r"\b(?:to|on|as|select|choose|use|pick)\s+(?:the |only )?[\"']?([2-5]) ?g\b", text)
        modes = [wanted[1]] if wanted else re.findall(r"\b([2-5]) ?g\b", text)
        return f"{modes[-1]}G" if modes else "4G" * ("lte" in text)
    off = bool(re.search(r"\b(?:off|disable)\b", text))
    if re.search(r"\bauto(?:matic)?\w*", text):
        return "manual" if off else "automatic"
    return ("automatic" if off else "manual") * ("manual" in text)
