"""Working days and periods."""

from ..library import Family

DAYS = '''
"""Single days, written as year-month-day."""

import datetime


def day(text):
    """Return a day from its text."""
    return datetime.date.fromisoformat(text)


def is_free(date, holidays):
    """Return whether nobody works on a day."""
    if date in holidays:
        return True
    return date.weekday() >= 5  #: saturday
    return date.weekday() == 6  #: !saturday


def following(date, holidays):
    """Return the first working day from a day on."""
    while is_free(date, holidays):
        date += datetime.timedelta(days=1)
    return date


def month_end(date):
    """Return the last day of a day's month."""
    first = date.replace(day=1) + datetime.timedelta(days=32)
    return first.replace(day=1) - datetime.timedelta(days=1)


def months_on(date, count):
    """Return the same day some months later, or the month's last day if it is shorter."""
    place = date.year * 12 + date.month - 1 + count
    first = datetime.date(place // 12, place % 12 + 1, 1)
    last = month_end(first)
    if date == month_end(date):  #: sticky
        return last  #: sticky
    return first.replace(day=min(date.day, last.day))
'''
CALENDAR = '''
"""The calendar."""

import datetime

from .days import day, following, is_free, month_end, months_on


class $Calendar:
    """Working days, with holidays."""

    def __init__(self, holidays=()):
        self._holidays = {day(text) for text in holidays}

    def $working(self, first, last):
        """Return the number of working days from the first to the last day, the last included."""  #: closed
        """Return the number of working days from the first to the last day, the last not included."""  #: !closed
        start, end = day(first), day(last)
        if start > end:
            raise ValueError("the period ends after it starts")
        count = 0
        while start <= end:  #: closed
        while start < end:  #: !closed
            if not is_free(start, self._holidays):
                count += 1
            start += datetime.timedelta(days=1)
        return count

    def $after(self, text, count):
        """Return the day some working days later, or before for a negative number."""
        date = day(text)
        step = datetime.timedelta(days=1 if count > 0 else -1)
        left = abs(count)
        while left > 0:
            date += step
            if not is_free(date, self._holidays):
                left -= 1
        return str(date)

    def $due(self, text, days=$credit):
        """Return when a bill is due: days later, moved to a working day."""  #: !monthly
        """Return when a bill is due: at the end of the month of some days later, moved to a working day."""  #: monthly
        date = day(text) + datetime.timedelta(days=days)
        date = month_end(date)  #: monthly
        return str(following(date, self._holidays))

    def $months(self, first, last):
        """Return first and last day of each month's part of a period."""
        start, end = day(first), day(last)
        parts = []
        while start <= end:
            stop = min(month_end(start), end)
            parts.append([str(start), str(stop)])
            start = stop + datetime.timedelta(days=1)
        return parts  #: !late
        return parts[::-1]  #: late

    def $repeat(self, text, count, every=1):
        """Return the days of a monthly date, the first included."""
        days = [months_on(day(text), every * number) for number in range(count)]
        days = [following(date, self._holidays) for date in days]  #: shift
        return [str(date) for date in days]

    def $overlap(self, one, other):
        """Return the number of days that two periods share; both of their ends belong to them."""
        first = max(day(one[0]), day(other[0]))
        last = min(day(one[1]), day(other[1]))
        return max(0, (last - first).days + 1)

    def week(self, text):
        """Return number of the week in the year, and of the day in the week, Monday being 1."""  #: !sunday
        """Return number of the week in the year, and of the day in the week, Sunday being 1."""  #: sunday
        date = day(text)
        number = date.weekday() + 1  #: !sunday
        number = (date.weekday() + 1) % 7 + 1  #: sunday
        return [(date.timetuple().tm_yday - 1) // 7 + 1, number]

    def age(self, born, text):
        """Return the full years between two days."""
        start, end = day(born), day(text)
        full = end.year - start.year
        return full - 1 if (end.month, end.day) < (start.month, start.day) else full
'''


def case(rng, on, n):
    def date(months=12):
        month = rng.randint(1, months)
        return f"2024-{month:02d}-{rng.choice((1, 2, 28, 29 if month == 2 else 30, rng.randint(3, 27), rng.randint(3, 27))):02d}"

    def month_days():
        return rng.choice(
            ("2024-01-31", "2024-01-30", "2024-02-29", "2024-04-30", "2023-12-31", "2024-03-15", "2024-08-31")
        )

    first, last = sorted((date(), date()))
    start = rng.randint(1, 20)
    month = rng.randint(1, 12)
    near, later = f"2024-{month:02d}-{start:02d}", f"2024-{month:02d}-{start + rng.randint(0, 8):02d}"
    holidays = [f"2024-{month:02d}-{start + rng.randint(0, 5):02d}"]
    new = f"c = {n['Calendar']}({holidays})\n"
    kind = rng.choice(("working", "working", "after", "due", "months", "repeat", "overlap", "week", "age"))
    if kind == "working":
        if rng.random() < 0.1:
            near, later = later, near
        return "counting working days", f"{new}c.{n['working']}({near!r}, {later!r})"
    if kind == "after":
        return (
            "counting forward by working days",
            f"{new}[c.{n['after']}({near!r}, k) for k in ({rng.randint(-6, 0)}, {rng.randint(1, 8)})]",
        )
    if kind == "due":
        days = f", days={rng.randint(0, 9)}" if rng.random() < 0.5 else ""
        return "asking when a bill is due", f"{new}c.{n['due']}({near!r}{days})"
    if kind == "months":
        return "splitting a period by months", f"{new}c.{n['months']}({first!r}, {last!r})"
    if kind == "repeat":
        every = f", every={rng.randint(1, 4)}" if rng.random() < 0.5 else ""
        return "repeating a date", f"{new}c.{n['repeat']}({month_days()!r}, {rng.randint(2, 5)}{every})"
    if kind == "overlap":
        periods = [
            sorted((f"2024-05-{rng.randint(1, 30):02d}", f"2024-05-{rng.randint(1, 30):02d}"))
            for _ in range(2)
        ]
        if rng.random() < 0.3:
            periods[1][0] = periods[0][1]
            periods[1][1] = "2024-06-02"
        return "comparing two periods", f"{new}c.{n['overlap']}({periods[0]}, {periods[1]})"
    if kind == "week":
        return "asking for the week", f"{new}[c.week(d) for d in ({date()!r}, {date(1)!r}, '2024-01-07')]"
    a, b = rng.randint(1, 12), rng.randint(1, 27)
    return (
        "asking for an age",
        f"{new}[c.age('1990-{a:02d}-{b:02d}', d) for d in ('2024-{a:02d}-{b + rng.randint(-1, 1) or 1:02d}', {date()!r})]",
    )


FAMILY = Family(
    name="dates",
    summary="A calendar of working days and periods.",
    options=("saturday", "sticky", "closed", "late", "shift", "sunday", "monthly"),
    names={
        "pkg": ("calendars", "workdays", "daybook"),
        "Calendar": ("Calendar", "Workdays", "Diary"),
        "working": ("working", "workdays"),
        "after": ("after", "later"),
        "due": ("due", "payable"),
        "months": ("months", "by_month"),
        "repeat": ("repeat", "monthly"),
        "overlap": ("overlap", "shared"),
        "credit": (7, 10, 14),
    },
    modules={"days": DAYS, "calendar": CALENDAR},
    rules="""
- Nobody works on Saturdays, Sundays and holidays.  #: saturday
- Nobody works on Sundays and holidays.  #: !saturday
- $working counts the working days of a period, its last day included.  #: closed
- $working counts the working days of a period without its last day.  #: !closed
- A period that ends before it starts raises ValueError in $working.
- $after counts working days on or, for negative numbers, back; the day itself is not counted. 0 gives the day itself.
- A bill is due $credit days later unless given, or after the given days.
- A bill is due on the last day of the month of that day.  #: monthly
- A bill that is due on a free day is due on the next working day.
- $months splits a period, both ends included, by months, in order.  #: !late
- $months splits a period, both ends included, by months, the last first.  #: late
- $repeat gives the same day of each month that follows, or the last of a shorter month.
- What begins on the last day of a month stays on last days.  #: sticky
- Repeated days that are free move to the next working day.  #: shift
- $overlap counts the days that two periods share; both ends belong to a period.
- The first week of a year is its first seven days. Weekdays are numbered from Monday, 1, on.  #: !sunday
- The first week of a year is its first seven days. Weekdays are numbered from Sunday, 1, on.  #: sunday
- An age is in full years; it rises on the birthday.
""",
    case=case,
)
