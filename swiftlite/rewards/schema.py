"""Validate completions under JSON schemas. Importing this module imports jsonschema."""

import json
from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable


def fits_schema(pair: tuple[str, Any]) -> float | str:
    """Return 1 if a text is JSON that is valid under a schema, otherwise 0; the problem, if the schema cannot be used.

    A pattern of the schema can take exponential time on a text. The caller limits the time.
    """
    text, schema = pair
    try:
        # An empty registry, because the default one downloads the schemas that `$ref` names.
        validator = validator_for(schema)(schema, registry=Registry())
        validator.validate(json.loads(text, parse_constant=_reject))
    except Unresolvable as error:
        return str(error)
    except (ValueError, ArithmeticError, RecursionError, ValidationError):  # 1e999 is a multiple of nothing
        return 0.0
    return 1.0


def check_schema(schema: Any) -> None:
    """Check a schema.

    Raises:
        jsonschema.SchemaError: it is invalid.
    """
    validator_for(schema).check_schema(schema)


def _reject(constant: str) -> float:
    """Reject NaN and Infinity, which Python reads although they are not JSON."""
    raise ValueError(constant)
