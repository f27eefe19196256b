"""The next action on each page, computed from the agent's view: the instruction and the lines of the page."""

from __future__ import annotations

import re
from itertools import pairwise

LEAST_CHOICES = 4
"""Number of different choices on a page that must be read."""
Line = dict
"""A line of the page: only ``text``, or an element with ``ref``, ``tag``, ``classes`` and its state."""


def next_call(page: str, query: str, lines: list[Line]) -> tuple[str, dict]:
    """Return the tool and the arguments of the next action on a page."""
    return ORACLES[page](query, lines)


def must_be_read(page: str, query: str, lines: list[Line]) -> bool:
    """Return True if a page has several choices, and clicking the elements in order selects a wrong one."""
    wanted, choices = CHOICES[page](query, lines)
    in_order = choices[-1] if page == "click-option" else choices[0]
    return len({*choices}) >= LEAST_CHOICES and wanted != in_order


def quoted(query: str) -> list[str]:
    """Return the quoted parts of an instruction."""
    return re.findall(r'"([^"]*)"', query)


def find(lines: list[Line], text: str | None = None, **wanted) -> Line | None:
    """Return the first element with a text and with attributes, or None."""
    for line in lines:
        fits = all(line.get(name) == value for name, value in wanted.items())
        if "ref" in line and fits and text in (None, line.get("text")):
            return line
    return None


def texts(lines: list[Line], **wanted) -> list[str]:
    """Return the texts of the elements with attributes, in their order."""
    return [line["text"] for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def selected(query: str) -> str:
    """Return the name after "Select" in an instruction."""
    return re.match(r"Select (.*?)(?: from the list)? and click Submit\.", query)[1]


def labels(lines: list[Line]) -> list[str]:
    """Return the labels of the radio buttons, which follow them."""
    return [after["text"] for line, after in pairwise(lines) if line.get("type") == "radio"]


def click(line: Line) -> tuple[str, dict]:
    return "click", {"element": line["ref"]}


def write(line: Line, text: str) -> tuple[str, dict]:
    return "type", {"element": line["ref"], "text": text}


def fields(lines: list[Line]) -> list[Line]:
    """Return the text fields in their order."""
    return [line for line in lines if line.get("type") in ("text", "password")]


def fill(lines: list[Line], values: list[str], button: str = "Submit") -> tuple[str, dict]:
    """Write each value into its field, then click the button."""
    for field, value in zip(fields(lines), values, strict=True):
        if field["value"] != value:
            return write(field, value)
    return click(find(lines, button))


def labelled(lines: list[Line], label: str) -> Line:
    """Return the element with a label, which is the text after the element."""
    place = next(i for i, line in enumerate(lines) if "ref" not in line and line["text"] == label)
    return lines[place - 1]


def click_quoted(query, lines):
    return click(find(lines, quoted(query)[0]))


def dialog(query, lines):
    name = quoted(query)[0]
    return click(find(lines, "close" if name == "x" else name) or find(lines, "Close"))


def enter(query, lines):
    return fill(lines, quoted(query)[:1])


def password(query, lines):
    return fill(lines, quoted(query)[:1] * 2)


def login(query, lines):
    return fill(lines, quoted(query)[:2], "Login")


def option(query, lines):
    wanted = labelled(lines, selected(query))
    return click(find(lines, "Submit") if wanted["checked"] else wanted)


def checkboxes(query, lines):
    names = re.fullmatch(r"Select (.*) and click Submit\.", query)[1].split(", ")
    for name in names if names != ["nothing"] else []:
        if not labelled(lines, name)["checked"]:
            return click(labelled(lines, name))
    return click(find(lines, "Submit"))


def choose(query, lines):
    wanted, box = selected(query), find(lines, tag="select")
    if box["value"] != wanted:
        return "select", {"element": box["ref"], "option": wanted}
    return click(find(lines, "Submit"))


def algebra(query, lines):
    text = next(line["text"] for line in lines if "=" in line.get("text", ""))
    left, sign, right, total = re.fullmatch(r"(\w+) ([+-]) (\w+) = (\d+)", text).groups()
    if sign == "+":
        answer = int(total) - int(right if left == "x" else left)
    else:
        answer = int(total) + int(right) if left == "x" else int(left) - int(total)
    return fill(lines, [str(answer)])


def table(query, lines):
    key = re.fullmatch(r"Enter the value of (.*) into the text field.*", query)[1]
    place = next(i for i, line in enumerate(lines) if line.get("text") == key)
    return fill(lines, [lines[place + 1]["text"]])


def collapsible(query, lines):
    link = find(lines, quoted(query)[0], classes="alink")
    if link is not None:
        return click(link)
    headers = [line for line in lines if line.get("text", "").startswith("Section #")]
    shown = next((i for i, line in enumerate(headers) if line["active"]), -1)
    return click(headers[(shown + 1) % len(headers)])


def word(query, lines):
    number = int(re.search(r"the (\d+)(st|nd|rd|th) word", query)[1])
    words = next(line["text"] for line in lines if line.get("tag") == "p").split()
    return fill(lines, [re.sub(r"[^a-zA-Z]", "", words[number - 1])])


def autocomplete(query, lines):
    start, *end = quoted(query)
    field = fields(lines)[0]
    for line in lines:
        text = line.get("text", "")
        menu = "ui-menu-item" in line.get("classes", "") or "ui-menu-item-wrapper" in line.get("classes", "")
        if menu and text.startswith(start) and text.endswith(end[0] if end else ""):
            return click(line)
    value = field["value"]
    if len(value) > len(start) and value.startswith(start) and value.endswith(end[0] if end else ""):
        return click(find(lines, "Submit"))
    return write(field, start)


def search(query, lines):
    name = quoted(query)[0]
    number = int(re.search(r"(\d)(st|nd|rd|th)", query)[1])
    field, results = fields(lines)[0], [line for line in lines if line.get("classes") == "search-title"]
    if field["value"] != name:
        return write(field, name)
    if not results:
        return click(find(lines, "Search"))
    page = find(lines, str((number - 1) // 3 + 1), tag="a")
    return click(results[(number - 1) % 3] if page["active"] else page)


def social(query, lines):
    user, action = re.search(r"For the user (@\S+), click on the \"(.*)\" button", query).groups()
    place = next(i for i, line in enumerate(lines) if line.get("text") == user)
    below = lines[place:]
    if action in ("Reply", "Retweet", "Like"):
        return click(find(below, classes=action.lower()))
    wanted = {"Mute": f"Mute {user}", "Block": f"Block {user}"}.get(action, action)
    end = next((i for i, line in enumerate(below) if i and line.get("classes") == "username"), len(below))
    return click(find(below[:end], wanted) or find(below, classes="more"))


def movies(query, lines):
    genre, name, year = re.fullmatch(
        r"Search for (.*) movies directed by (.*) from year (\d+)\.", query
    ).groups()
    values = {"Genre": genre, "Director": name, "Year": year}
    for before, field in pairwise(lines):
        value = values.get(before.get("text", ""))
        if value is not None and field["value"] != value:
            return write(field, value)
    return click(find(lines, "Submit"))


ORACLES = {
    "click-button": click_quoted,
    "click-link": click_quoted,
    "click-dialog-2": dialog,
    "enter-text": enter,
    "enter-text-dynamic": enter,
    "enter-password": password,
    "login-user": login,
    "click-option": option,
    "click-checkboxes": checkboxes,
    "choose-list": choose,
    "simple-algebra": algebra,
    "read-table": table,
    "find-word": word,
    "multi-orderings": movies,
    "click-collapsible-2-nodelay": collapsible,
    "use-autocomplete-nodelay": autocomplete,
    "search-engine": search,
    "social-media": social,
}
CHOICES = {
    "click-button": lambda query, lines: (quoted(query)[0], texts(lines, tag="button")),
    "click-link": lambda query, lines: (quoted(query)[0], texts(lines, classes="alink")),
    "click-option": lambda query, lines: (selected(query), labels(lines)),
    "choose-list": lambda query, lines: (selected(query), find(lines, tag="select")["options"]),
}
"""Page of level 1 -> the text of the right choice, and the texts of all choices in order."""
