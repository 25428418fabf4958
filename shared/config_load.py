"""Reading settings: defaults, then one TOML file, then `TOKENMILL_*` variables.

Every value keeps its origin, so that an error or `config show` can name it.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from .config import Config, ModelConfig, TenantConfig
from .config_check import check
from .errors import ConfigError
from .redis import redact_url

PREFIX: Final = "TOKENMILL_"
DEFAULT_FILE: Final = "tokenmill.toml"
"""Read from the current directory when neither a path nor a variable names one."""
NOT_SETTINGS: Final = frozenset(
    {
        "TOKENMILL_URL",
        "TOKENMILL_CONFIG",
        "TOKENMILL_DEBUG",
        "TOKENMILL_KERNELS",
    }
)
"""Variables with a meaning of their own, read elsewhere."""
SECRETS: Final = frozenset({"webhooks.secret", "webhooks.previous_secret"})
"""Settings whose values are never shown."""
RESERVED_PREFIXES: Final = (
    *("TOKENMILL_TEST_", "TOKENMILL_BENCH_"),
    *("TOKENMILL_BUILD_", "TOKENMILL_PROC_"),
    *("TOKENMILL_REQUIRE_", "TOKENMILL_CHROMIUM"),
)
"""Of our tests, benchmarks, build and process supervision; never settings."""
_MODELS_VARIABLE: Final = "TOKENMILL_MODELS"

_SECTIONS: Final = {
    name: hint
    for name, hint in get_type_hints(Config).items()
    if name not in ("models", "tenants")
}
_FIELDS: Final = {name: get_type_hints(kind) for name, kind in _SECTIONS.items()}
_MODEL_FIELDS: Final = get_type_hints(ModelConfig)
_LISTS: Final = (tuple[int, ...], tuple[str, ...])
"""A variable holds these as values separated by commas."""
_TENANTS_VARIABLE: Final = "TOKENMILL_TENANTS"
_TENANT_FIELDS: Final = get_type_hints(TenantConfig)


class LoadedConfig(msgspec.Struct, frozen=True):
    """Settings in force and where each value came from."""

    config: Config
    origins: dict[str, str]
    """Dotted key -> `default`, a file's path or a variable's name."""

    def rows(self) -> list[tuple[str, object, str]]:
        """Returns (key, value, origin) of every setting, passwords blanked."""
        rows: list[tuple[str, object, str]] = []
        for section in _SECTIONS:
            for field in _FIELDS[section]:
                key = f"{section}.{field}"
                value = getattr(getattr(self.config, section), field)
                if key == "redis.url" and value is not None:
                    value = redact_url(value)
                elif key in SECRETS and value is not None:
                    value = "***"
                rows.append((key, value, self.origins.get(key, "default")))
        for index, model in enumerate(self.config.models):
            for field in _MODEL_FIELDS:
                key = f"models[{index}].{field}"
                origin = self.origins.get(key, "default")
                value = getattr(model, field)
                if field == "limits":
                    value = msgspec.to_builtins(value)  # those that differ
                rows.append((key, value, origin))
        for name, tenant in self.config.tenants.items():
            for field in _TENANT_FIELDS:
                key = f"tenants.{name}.{field}"
                origin = self.origins.get(key, "default")
                rows.append((key, getattr(tenant, field), origin))
        return rows


def load_config(
    path: Path | None = None, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Reads the settings in force.

    Args:
        path: TOML file; None takes `TOKENMILL_CONFIG`, else `tokenmill.toml` in the
            current directory if there is one.
        environ: Environment variables; None takes the process's own.

    Returns:
        The settings with the origin of each.

    Raises:
        ConfigError: A key is unknown, a value cannot be read or is out of range, or
            a file that was asked for is missing.
    """
    variables = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    file = _choose_file(path, variables)
    if file is not None:
        _merge_file(file, values, origins)
    _merge_variables(variables, values, origins)
    config = msgspec.convert(values, Config)
    loaded = LoadedConfig(config, origins)
    check(config, origins)
    return loaded


def _choose_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is not None:
        return path
    named = environ.get("TOKENMILL_CONFIG")
    if named:
        return Path(named)
    default = Path(DEFAULT_FILE)
    return default if default.is_file() else None


def _merge_file(file: Path, values: dict[str, object], origins: dict[str, str]) -> None:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "config", f"cannot read the file: {error.strerror}", str(file)
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"not valid TOML: {error}", str(file)) from error
    for section, table in document.items():
        if section == "models":
            values["models"] = _models(table, str(file), origins)
        elif section == "tenants":
            values["tenants"] = _tenants(table, str(file), origins)
        elif section not in _SECTIONS:
            known = ", ".join([*_SECTIONS, "models", "tenants"])
            raise ConfigError(section, f"unknown section; known: {known}", str(file))
        else:
            values[section] = _section(section, table, str(file), origins)


def _section(
    section: str, table: object, origin: str, origins: dict[str, str]
) -> dict[str, object]:
    if not isinstance(table, dict):
        raise ConfigError(section, f"expected a table [{section}]", origin)
    read: dict[str, object] = {}
    for field, raw in table.items():
        key = f"{section}.{field}"
        kind = _kind(key, field, _FIELDS[section], origin)
        read[field] = convert_setting(key, raw, kind, origin, from_text=False)
        origins[key] = origin
    return read


def _models(
    tables: object, origin: str, origins: dict[str, str]
) -> list[dict[str, object]]:
    if not isinstance(tables, list) or not tables:
        raise ConfigError("models", "expected one or more tables [[models]]", origin)
    read: list[dict[str, object]] = []
    for index, table in enumerate(tables):
        if not isinstance(table, dict):
            raise ConfigError(f"models[{index}]", "expected a table", origin)
        model: dict[str, object] = {}
        for field, raw in table.items():
            key = f"models[{index}].{field}"
            kind = _kind(key, field, _MODEL_FIELDS, origin)
            model[field] = convert_setting(key, raw, kind, origin, from_text=False)
            origins[key] = origin
        read.append(model)
    return read


def _tenants(
    tables: object, origin: str, origins: dict[str, str]
) -> dict[str, dict[str, object]]:
    if not isinstance(tables, dict):
        raise ConfigError("tenants", "expected tables [tenants.<name>]", origin)
    read: dict[str, dict[str, object]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"tenants.{name}", "expected a table", origin)
        own = read[name] = {}
        for field, raw in table.items():
            key = f"tenants.{name}.{field}"
            kind = _kind(key, field, _TENANT_FIELDS, origin)
            own[field] = convert_setting(key, raw, kind, origin, from_text=False)
            origins[key] = origin
    return read


def _merge_variables(
    environ: Mapping[str, str], values: dict[str, object], origins: dict[str, str]
) -> None:
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in NOT_SETTINGS:
            continue
        if name.startswith(RESERVED_PREFIXES):
            continue
        text = environ[name]
        if name == _MODELS_VARIABLE:
            values["models"] = _models(_models_from_text(text), name, origins)
            continue
        if name == _TENANTS_VARIABLE:
            values["tenants"] = _tenants(_tenants_from_text(text), name, origins)
            continue
        section, _, field = name.removeprefix(PREFIX).lower().partition("_")
        key = f"{section}.{field}" if field else section
        if section not in _SECTIONS:
            known = ", ".join(f"{PREFIX}{s.upper()}_…" for s in _SECTIONS)
            raise ConfigError(key, f"unknown setting; known are {known}", name)
        kind = _kind(key, field, _FIELDS[section], name)
        table = values.setdefault(section, {})
        assert isinstance(table, dict)
        table[field] = convert_setting(key, text, kind, name, from_text=True)
        origins[key] = name


def _models_from_text(text: str) -> list[object]:
    """A JSON array of tables, or names separated by commas."""
    if not text.lstrip().startswith("["):
        return [{"name": part.strip()} for part in text.split(",") if part.strip()]
    try:
        return msgspec.json.decode(text, type=list[object])
    except msgspec.DecodeError as error:
        problem = f"expected names separated by commas or a JSON array: {error}"
        raise ConfigError("models", problem, _MODELS_VARIABLE) from error


def _tenants_from_text(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        problem = f"expected a JSON object of tenants by name: {error}"
        raise ConfigError("tenants", problem, _TENANTS_VARIABLE) from error


def _kind(key: str, field: str, fields: dict[str, type], origin: str) -> type:
    if field not in fields:
        raise ConfigError(key, f"unknown key; known here: {', '.join(fields)}", origin)
    return fields[field]


def convert_setting(
    key: str, raw: object, kind: type, origin: str, *, from_text: bool
) -> object:
    """Returns one value of a setting.

    Args:
        key: The setting's name, for the error.
        raw: As it was given.
        kind: Its type.
        origin: Where it comes from, for the error.
        from_text: Whether numbers and lists come as text.

    Raises:
        ConfigError: It is of another type, or none of those that are possible.
    """
    if from_text and isinstance(raw, str) and kind in _LISTS:
        raw = [part.strip() for part in raw.split(",") if part.strip()]
    try:
        return msgspec.convert(raw, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        shown = redact_url(raw) if isinstance(raw, str) else raw
        shown = "***" if key in SECRETS else shown
        expected = str(error)
        if get_origin(kind) is Literal:
            expected = f"expected one of {', '.join(map(str, get_args(kind)))}"
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            expected += f"; known here: {', '.join(kind.__struct_fields__)}"
        problem = f"value {shown!r} is unusable: {expected}"
        raise ConfigError(key, problem, origin) from None
