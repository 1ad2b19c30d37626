"""Strict schemas for everything that is read from YAML or JSON.

A schema is a frozen pydantic model; an unknown key fails and names the nearest known one.
"""

from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

from heads.errors import UserError, unknown_name


class Strict(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


S = TypeVar("S", bound=Strict)


def parse(schema: type[S], data: dict[str, Any], where: str) -> S:
    """`data` as a `schema`; `where` names the file or command in the error."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _keys_beside(schema, first["loc"])
            raise unknown_name(f"key in {where}:", path, known) from None
        raise UserError(
            f"{where}: {path or 'value'}: {first['msg']} (given: {first.get('input')!r})"
        ) from None


def _keys_beside(schema: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Dotted names of every known key in the section that holds the unknown one."""
    model: type[BaseModel] = schema
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        options = [field.annotation, *get_args(field.annotation)] if field else []
        sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not sections:
            break
        model = sections[0]
    prefix = ".".join(str(part) for part in loc[:-1])
    return [f"{prefix}.{name}" if prefix else name for name in model.model_fields]


def load_yaml(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The mapping in a YAML file with dotted overrides (`optimizer.lr=1e-3`) laid over it."""
    if not path.is_file():
        raise UserError(f"no such file: {path}; expected a YAML recipe")
    for item in overrides or []:
        if "=" not in item:
            raise UserError(f"override {item!r} is not of the form key.sub=value")
    try:
        base = OmegaConf.load(path)
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides or [])))
        data = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a valid recipe: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping at the top level, found {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def load_recipe(schema: type[S], path: Path, overrides: list[str] | None = None) -> S:
    """A YAML file with dotted overrides as a strict `schema`."""
    return parse(schema, load_yaml(path, overrides), str(path))
