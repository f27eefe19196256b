"""The base of all sections of a configuration, and types of their fields."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections; ``problems`` reports constraints between fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        return []

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        if found := self.problems():
            raise ValueError("\n".join(found))
        return self


class Table(Section):
    """Base of tables that are the value of a single key: a function with its parameters, or a method."""
