"""Settings: what a TOML file and the environment say of a command, beneath its flags.

Flags win over the environment, the environment over the file, the file over defaults. The names are those of the flags,
with underscores: `max_num_seqs` in the file, JHYBRID_MAX_NUM_SEQS in the environment. `jhybrid serve` uses it all,
`jhybrid profile` files only.
"""

import contextlib
import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from jhybrid.config import PREFIX, RESERVED
from jhybrid.errors import ConfigError

Command = TypeVar("Command")


class Settings(Generic[Command]):
    """The settings of one command, a dataclass of defaults. Those of dataclasses inside it lie beside its own."""

    def __init__(self, kind: type[Command], flags_only: Collection[str] = (), secret: Collection[str] = ()):
        """`flags_only` are no settings; the values of `secret` ones are never shown."""
        self._kind, self._secret = kind, secret
        self._types = {name: type_ for name, type_ in _types(kind).items() if name not in flags_only}
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def read_file(self, path: Path) -> None:
        """Take a TOML file in. ConfigError for one that cannot be read, or with all unknown keys and wrong types."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("config", f"{path} cannot be read: {error}") from error
        table.pop("slice", None)  # what chips the settings are meant for: see slices.py
        faults: dict[str, str] = {}
        for name, value in table.items():
            if name not in self._types:
                faults[name] = f"in {path} is no setting{_nearest(name, self._types)}"
                continue
            try:
                text = json.dumps(value)
                self._values[name] = TypeAdapter(self._types[name]).validate_json(text, strict=True)
            except (TypeError, ValidationError) as error:
                faults[name] = f"{_shown(name, value, self._secret)} in {path}: {_why(error)}"
            self._sources[name] = str(path)
        _raise(faults)

    def read_environment(self, variables: Mapping[str, str]) -> None:
        """Take the variables in whose names begin with JHYBRID_; empty ones are as if unset. ConfigError as above."""
        names = {PREFIX + name.upper(): name for name in self._types}
        faults: dict[str, str] = {}
        for variable, text in variables.items():
            if not text or not variable.startswith(PREFIX) or variable in RESERVED:
                continue
            hint = " (Kubernetes sets it for a service of this name: set enableServiceLinks to false)"
            hint = hint if re.match(f"{PREFIX}(SERVICE_|PORT)", variable) and not text.isdecimal() else ""
            name = names.get(variable)
            if name is None:
                faults[variable] = f"is no setting{hint or _nearest(variable, names)}"
                continue
            try:
                self._values[name] = _parse(self._types[name], text)
            except ValidationError as error:
                faults[variable] = f"{_shown(name, text, self._secret)}: {_why(error)}{hint}"
            self._sources[name] = variable
        _raise(faults)

    def defaults(self) -> Command:
        """The command that no flag changes, without its secrets, so that no help text can show them.

        It is not validated: a flag may be what makes it right.
        """
        return _fill(self._kind, {name: value for name, value in self._values.items() if name not in self._secret})

    def with_secrets(self, command: Command) -> Command:
        """A command with those of its secrets that no flag gave."""
        given = {name: self._values[name] for name in self._secret if name in self._values}
        return dataclasses.replace(command, **{n: v for n, v in given.items() if not getattr(command, n)})  # pyright: ignore[reportArgumentType, reportCallIssue]

    @contextlib.contextmanager
    def blamed(self, arguments: Collection[str]) -> Iterator[None]:
        """Lets a ConfigError raised inside say where the value came from, if no flag among `arguments` gave it."""
        flags = {
            re.sub("^--(no-)?|=.*", "", argument).replace("-", "_")
            for argument in arguments
            if argument.startswith("--")
        }
        try:
            yield
        except ConfigError as error:
            if error.field not in self._sources or error.field in flags:
                raise
            message = str(error).removeprefix(f"{error.field}: ")
            raise ConfigError(error.field, f"{message} (from {self._sources[error.field]})") from error

    def as_toml(self, command: Command) -> str:
        """A command as a file that reads back equal but for its secrets, whose number alone is shown."""
        flat = _flat(command)
        lines = [f"# {name}: {len(flat[name])} given, not shown" for name in self._secret if flat[name]]
        shown = {n: flat[n] for n in self._types if n not in self._secret and flat[n] is not None}
        plain = {n: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Path) else v for n, v in shown.items()}
        return "".join(f"{line}\n" for line in lines) + tomli_w.dumps(plain)


def _raise(faults: Mapping[str, str]) -> None:
    """ConfigError with all faults by name, if there are any."""
    if faults:
        (name, fault), *others = faults.items()
        raise ConfigError(name, "\n".join([fault, *(f"{other}: {what}" for other, what in others)]))


def _types(kind: Any) -> dict[str, Any]:
    """Name -> type of a dataclass's settings."""
    found: dict[str, Any] = {}
    for name, type_ in get_type_hints(kind).items():
        found |= _types(type_) if dataclasses.is_dataclass(type_) else {name: type_}
    return found


def _fill(kind: Any, values: dict[str, Any]) -> Any:
    """An instance with these values and defaults, made without its checks."""
    made, types = object.__new__(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(types[field.name]):
            value = _fill(types[field.name], values)
        else:
            value = values.get(field.name, field.default)
        assert value is not dataclasses.MISSING, f"{field.name} has no default"
        object.__setattr__(made, field.name, value)
    return made


def _flat(command: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        found |= _flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return found


def _parse(type_: Any, text: str) -> Any:
    if get_origin(type_) is tuple:
        return TypeAdapter(type_).validate_python(tuple(part.strip() for part in text.split(",") if part.strip()))
    return TypeAdapter(type_).validate_strings(text)


def _shown(name: str, value: object, secret: Collection[str]) -> str:
    return "the value" if name in secret else f"{value!r}"


def _nearest(name: str, known: Collection[str]) -> str:
    [*close] = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; did you mean {close[0]}?" if close else "; `--help` shows them all"


def _why(error: Exception) -> str:
    """What is wrong with a value, without the value."""
    if isinstance(error, ValidationError):
        return "; ".join(dict.fromkeys(detail["msg"].lower() for detail in error.errors(include_input=False)))
    return "no value of this kind is taken"
