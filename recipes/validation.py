"""What a pydantic model refuses, and what it expects, in a line for the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: dict[str, Any]) -> Model:
    """The settings.

    Raises:
        ValueError: one cannot be, or some do not go together, in one line.
    """
    try:
        return model(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        said = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            raise ValueError(said) from None
        name, schemas = str(fault["loc"][0]), model.model_json_schema()["properties"]
        if name not in schemas:
            raise ValueError(f"{name} is unknown; expected one of {', '.join(schemas)}.") from None
        what = said if fault["type"] == "value_error" else expected(schemas[name])
        if fault["type"] == "missing":
            raise ValueError(f"{name}= is missing; expected {schemas[name]['description']}.") from None
        raise ValueError(f"{name}={values[name]} cannot be; expected {what}.") from None


def expected(schema: dict[str, Any]) -> str:
    """What a field of a JSON schema may be, in words."""
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return f"one of {' '.join(map(str, filter(None, choices)))}"
    if "anyOf" in schema:
        return expected(next(one for one in schema["anyOf"] if one.get("type") != "null"))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        least = "above 0" if "exclusiveMinimum" in schema else "of 0 or more"
        below = f" and below {schema['exclusiveMaximum']}" if "exclusiveMaximum" in schema else ""
        return f"a {'whole ' if kind == 'integer' else ''}number {least}{below}"
    if kind == "array":
        return re.sub("^one of|^a ((?:whole )?number)", lambda match: f"{match[1]}s" if match[1] else "some of",
                      expected(schema["items"]))  # fmt: skip
    if "pattern" in schema:
        return "source and target language, as in de-en"
    return {"boolean": "yes or no", "object": "a table"}.get(str(kind), "text")


def described(model: type[BaseModel], names: Iterable[str], values: dict[str, Any]) -> Iterator[str]:
    """A line for each of some fields: its name, its value here or else its default, what it means, what it may be."""
    schemas = model.model_json_schema()["properties"]
    for name in names:
        value = values.get(name, schemas[name].get("default"))
        shown = "" if value in (None, "", [], {}) else f"={' '.join(map(str, value)) if type(value) is list else value}"
        meaning = " ".join(schemas[name].get("description", "").split())
        kind = expected(schemas[name])
        parts = filter(None, (meaning, "" if meaning and kind == "text" else kind))
        yield f"{name}{shown}: {'; '.join(parts)}"
