"""The customer's phone, which is hidden from the desk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from agentrl_env import ToolError, tool

from ..device import Device, Use
from .hearing import understand
from .records import ACCESS_POINT, ACTIVE, data_left

Setting = Literal[
    "airplane mode", "SIM card", "SIM lock", "network selection", "mobile data", "access point",
    "data roaming", "data saver", "network mode", "VPN", "Wi-Fi calling",
]  # fmt: skip
Changed = Literal[
    "airplane mode", "network selection", "mobile data", "access point", "data roaming", "data saver",
    "network mode", "VPN", "Wi-Fi calling",
]  # fmt: skip
State = dict[str, str]
MODES = ("2G", "3G", "4G", "5G")
VALUES: dict[str, tuple[str, ...]] = {
    "network selection": ("automatic", "manual"),
    "network mode": MODES,
}
"""The possible values of settings that are not "on" and "off" or any text."""
RIGHT: State = {
    "airplane mode": "off",
    "SIM card": "in place",
    "SIM lock": "open",
    "network selection": "automatic",
    "mobile data": "on",
    "access point": ACCESS_POINT,
    "data roaming": "off",
    "data saver": "off",
    "network mode": "5G",
    "VPN": "off",
    "Wi-Fi calling": "on",
}
"""A phone at home without a fault."""
RESTART, DONE, NEEDED = "restart", "done", "needed"
WORKS = "It works now."


class Trouble(NamedTuple):
    """A complaint about a phone."""

    settings: dict[str, str]
    """The settings that can cause it and their right values, in the order of the desk's questions."""
    wrong: dict[str, tuple[str, ...]]
    """The faulty values."""
    still: str
    """The customer's words if the problem still exists."""


_DATA = {"mobile data": "on", "access point": ACCESS_POINT}
_WRONG_POINTS = ("web.corvo", "wap.corva", "internet.old", "mms.corva")
TROUBLES = {
    "calls": Trouble(
        {
            "airplane mode": "off",
            "SIM card": "in place",
            "SIM lock": "open",
            "network selection": "automatic",
        },
        {
            "airplane mode": ("on",),
            "SIM card": ("loose",),
            "SIM lock": ("locked",),
            "network selection": ("manual",),
        },
        "There is no service: I can neither call nor go online.",
    ),
    "internet": Trouble(
        _DATA,
        {"mobile data": ("off",), "access point": _WRONG_POINTS},
        "There is still no mobile internet. Calls work.",
    ),
    "abroad": Trouble(
        {**_DATA, "data roaming": "on"},
        {"mobile data": ("off",), "access point": _WRONG_POINTS, "data roaming": ("off",)},
        "There is still no mobile internet here. Calls work.",
    ),
    "slow": Trouble(
        {"data saver": "off", "network mode": "5G", "VPN": "off"},
        {"data saver": ("on",), "network mode": ("2G", "3G"), "VPN": ("on",)},
        "The mobile internet is still slow.",
    ),
}
_WITH_ARTICLE = ("VPN", "network mode", "network selection", "access point")
_LOOKS = {
    ("SIM card", "in place"): "The SIM card is in place.",
    ("SIM card", "loose"): "The phone says that there is no SIM card.",
    ("SIM card", "out"): "The SIM card is out of the phone.",
    ("SIM lock", "open"): "The SIM card is not locked.",
    ("SIM lock", "locked"): "The SIM card is locked, and the phone asks for the PUK.",
}


def seen(setting: str, value: str) -> str:
    """Return the sentence of a customer who has looked at a setting."""
    if text := _LOOKS.get((setting, value)):
        return text
    name = f"The {setting}" if setting in _WITH_ARTICLE else setting[0].upper() + setting[1:]
    return f"{name} is {value}."


class Phone(Device):
    """The phone of a customer, and the customer's possible actions.

    Args:
        state: Its settings before the dialogue.
        complaint: The complaint, as a key of TROUBLES, or "" if there is none.
        account: Returns the line of the phone in the operator's records.
        abroad: True if the customer is abroad.
    """

    name = "phone"
    test = "test_service"

    def __init__(
        self, state: Mapping[str, str], *, complaint: str, account: Callable[[], dict] | None, abroad: bool
    ) -> None:
        self.state: State = {**state, RESTART: DONE}
        self.complaint, self.account, self.abroad = complaint, account, abroad
        mended = TROUBLES[complaint].settings if complaint else {}
        self.wanted: State = {**self.state, **mended}

    @tool
    def look(self, setting: Setting):
        """Look at a setting of the phone.

        Args:
            setting: The setting.
        """
        return seen(setting, self.state[setting])

    @tool
    def look_at_screen(self):
        """Look at the symbols and messages at the top of the screen."""
        state = self.state
        shown = [
            seen(setting, state[setting])
            for setting in ("SIM card", "SIM lock")
            if state[setting] != RIGHT[setting]
        ]
        if state["airplane mode"] == "on":
            shown.append("I see the symbol of an airplane.")
        elif not self._has_service():
            shown.append("It says that there is no service.")
        elif self._has_internet():
            shown.append(f"I see the bars of the network and {state['network mode']}.")
        else:
            shown.append("I see the bars of the network, but no sign of mobile data.")
        shown += ["There is also a key, the symbol of the VPN."] * (state["VPN"] == "on")
        return " ".join(shown)

    @tool
    def change(self, setting: Changed, value: str):
        """Change a setting of the phone.

        Args:
            setting: The setting.
            value: "on" or "off". The network selection is "automatic" or "manual", the network mode "2G",
                "3G", "4G" or "5G", and the access point a name.
        """
        allowed = VALUES.get(setting, ("on", "off"))
        if setting != "access point" and value not in allowed:
            raise ToolError(f"I cannot choose that: the {setting} can be {' or '.join(allowed)}.")
        if value == self.state[setting]:
            return seen(setting, value).replace(" is ", " is already ")
        self.state[setting] = value
        if setting == "access point":
            self.state[RESTART] = NEEDED
        return f"{seen(setting, value).removesuffix('.')} now."

    @tool
    def remove_sim(self):
        """Take the SIM card out of the phone."""
        self.state["SIM card"] = "out"
        return "The SIM card is out."

    @tool
    def insert_sim(self):
        """Put the SIM card into the phone again."""
        if self.state["SIM card"] != "in place":
            self.state.update({"SIM card": "in place", RESTART: NEEDED})
        return "The SIM card is in place now."

    @tool
    def enter_puk(self, code: str):
        """Enter the PUK, if the phone asks for it.

        Args:
            code: The digits.
        """
        if self.state["SIM lock"] == "open":
            raise ToolError("The phone does not ask for a PUK.")
        if self.account is None or code != self.account()["sim"]["puk"]:
            raise ToolError("The phone says that this PUK is wrong.")
        self.state["SIM lock"] = "open"
        return "The phone has taken the PUK. The SIM card is no longer locked."

    @tool
    def restart(self):
        """Turn the phone off and on again."""
        self.state[RESTART] = DONE
        return "The phone has restarted."

    @tool
    def test_service(self):
        """Try if calls and the mobile internet work."""
        if not self.complaint:
            return WORKS
        works = {"calls": self._has_service, "slow": self._is_fast}.get(self.complaint, self._has_internet)
        return WORKS if works() else TROUBLES[self.complaint].still

    def hear(self, messages: Sequence[str]) -> list[Use]:
        return understand(messages)

    def works(self, answer: str) -> bool:
        return answer == WORKS

    def right(self) -> bool:
        return self.state == self.wanted

    def _is_right(self, *settings: str) -> bool:
        return all(self.state[setting] == RIGHT[setting] for setting in settings)

    def _line(self) -> dict[str, Any]:
        if self.account is None:
            return {}
        return self.account()

    def _has_service(self) -> bool:
        return (
            self._is_right(*TROUBLES["calls"].settings)
            and self.state[RESTART] == DONE
            and self._line().get("status", ACTIVE) == ACTIVE
        )

    def _has_internet(self) -> bool:
        if not (self._has_service() and self._is_right(*TROUBLES["internet"].settings)):
            return False
        return not self.abroad or (self.state["data roaming"] == "on" and self._line().get("roaming", True))

    def _is_fast(self) -> bool:
        line = self._line()
        return (
            self._has_internet()
            and self._is_right(*TROUBLES["slow"].settings)
            and (not line or data_left(line) > 0)
        )
