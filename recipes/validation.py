"""Errors and help of pydantic models, as lines for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: dict[str, Any]) -> Model:
    """The model of these values.

    Raises:
        ValueError: a value is invalid, or some values contradict each other; the message has one line.
    """
    try:
        return model(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        message = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            raise ValueError(message) from None
        name = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            raise ValueError(f"{name} is unknown; expected one of {', '.join(model.model_fields)}.") from None
        meaning = " ".join((model.model_fields[name].description or "").split())
        if fault["type"] == "missing":
            raise ValueError(f"{name}= is missing; expected {meaning}.") from None
        expected = f"expected {message}" if fault["type"] == "value_error" else message[0].lower() + message[1:]
        value = values.get(name, fault["input"])
        raise ValueError(f"{name}={value} is invalid: {expected}{f' ({meaning})' if meaning else ''}.") from None


def described(model: type[BaseModel], names: Iterable[str], values: dict[str, Any]) -> Iterator[str]:
    """A line for each of the named fields: name, value (or else the default), meaning, choices."""
    schemas = model.model_json_schema(by_alias=False)["properties"]
    for name in names:
        schema = schemas[name]
        value = values.get(name, schema.get("default"))
        shown = "" if value in (None, "", [], {}) else f"={' '.join(map(str, value)) if type(value) is list else value}"
        choices = " ".join(schema.get("enum") or schema.get("items", {}).get("enum") or ()).strip()
        meaning = filter(None, [" ".join(schema.get("description", "").split()), choices])
        yield f"{name}{shown}: {'; one of: '.join(meaning)}"
