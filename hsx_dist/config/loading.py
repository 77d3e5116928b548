"""Reads settings: a YAML file, ``key.sub=value`` overrides, ``${env:NAME}``. Only this module reads YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from hsx_dist.config.models import ExtractConfig
from hsx_dist.config.problems import config_error
from hsx_dist.config.redaction import redact_text
from hsx_dist.config.secret_names import is_env_reference
from hsx_dist.config.secrets import hide_secrets, secret_paths
from hsx_dist.config.urls import public_url
from hsx_dist.errors import ConfigError
from hsx_dist.home import with_home
from hsx_dist.regular_files import is_descriptor, open_regular

#: Name of a setting, such as ``store.storage_options.client_kwargs``. No URL, which may have a credential, matches.
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
#: Text of the file in PyYAML's messages, which may be a credential. Single characters and token names are none.
_QUOTED = re.compile(r"""(['"])(?!<[a-z ]+>\1|\\?.\1).*""", re.DOTALL)
#: Limit of the characters of a file or an override. PyYAML takes up to 370 bytes for each.
MAX_LENGTH = 1 << 18
#: Characters of a number. Python takes quadratic time for a long one.
_MAX_NUMBER = 100
#: Characters that the aliases of one text may stand for.
_MAX_ALIASED = 100_000
#: A name and a value without a blank between them.
_JOINED = re.compile(r"[\w.-]+[:=]\S")
_ENV = re.compile(r"\$\{env:([^{}]*)\}")


def load_config(path: str | None, overrides: Sequence[str] = (), **direct: Any) -> ExtractConfig:
    """Return the settings of an extraction from ``path``, ``direct`` and ``overrides``. The last value wins.

    Args:
        path: a YAML file with settings. ``${env:NAME}`` is the value of an environment variable.
        overrides: texts ``key.sub=value``, as on a command line. The value is YAML.
        direct: values by the names of ``ExtractConfig``'s fields.

    Raises:
        ConfigError: one line for each problem: an unreadable file, an unknown or contradictory setting, an environment
            variable that is not set, a credential as an override.

    Example:
        >>> config = load_config(None, ["engine_kwargs.dtype=float32"], model="MODEL", output="runs/one", layers=[15])
        >>> config.engine_kwargs
        {'dtype': 'float32'}
    """
    settings = read_yaml(path) if path is not None else {}
    for name, value in direct.items():
        settings[name] = _merged(settings.get(name), value)
    for override in overrides:
        _override(settings, override)
    found: set[str] = set()
    resolved = {name: _with_env(value, (name,), found) for name, value in settings.items()}
    try:
        return ExtractConfig.model_validate(resolved)
    except ValidationError as e:
        raise config_error(e, ExtractConfig, hidden=found) from None


def read_yaml(path: str) -> dict[str, Any]:
    """Return the mapping in a local YAML file. Raises ConfigError if there is none.

    A FIFO or a device is refused, except by a path of ``is_descriptor``.
    """
    found = with_home(path)
    try:
        with open(found, encoding="utf-8", opener=None if is_descriptor(found) else open_regular) as file:
            text = file.read(MAX_LENGTH + 1)
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else type(e).__name__
        shown = public_url(path)
        raise ConfigError(f"expected a readable YAML file at {shown}, got: {why}. Check the path") from None
    value = _parse(text, f"{path}")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        raise ConfigError(
            f"{path}: expected a mapping of settings, got a {type(value).__name__}. Write `key: value` lines"
        )
    return value


def refuse_on_command_line(value: object, path: tuple[str, ...]) -> None:
    """Raise ConfigError if the setting ``path``, given as an argument of a command, holds a literal credential."""
    for secret in secret_paths(value, path):
        raise ConfigError(
            f"{'.'.join(secret)}: expected no credential on a command line (job lists show it), got one. Set it in "
            f"the environment, and write {'.'.join(secret)}='${{env:NAME}}', or put `${{env:NAME}}` into the YAML file"
        )


def parse_storage_options(options: Sequence[str]) -> dict[str, Any]:
    """Return fsspec options from ``key.sub=value`` strings of a command line. Refuses a literal credential."""
    root: dict[str, Any] = {}
    for option in options:
        _override(root, option, ("storage_options",))
    return with_environment(root)


def with_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with the value of each ``${env:NAME}``. Raises ``ConfigError`` if a variable is not set."""
    return {name: _with_env(value, (name,), set()) for name, value in options.items()}


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML in which a repeated key is an error: the first value would be lost silently.

    So are aliases that stand for too much text: later code visits each of them, and nested ones multiply.
    So is ``{secret:VALUE}``, a name without a value: the name would be shown. So are integers of more than 64 bits,
    and tags of which JSON has no value, such as ``!!set``. A value such as 12:30 is text, as in YAML 1.2, and no number
    to base 60. So is a date.
    """

    yaml_constructors = {  # noqa: RUF012 (PyYAML's own class attribute)
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "str", "seq", "map")  # None: any other tag
    }

    def __init__(self, text: str):
        super().__init__(text)
        self._length = 0  # of the text so far, one more for each value, if the values were in place of their aliases
        self._aliased = 0  # the part of this length that is from aliases
        self._lengths: dict[yaml.Node | None, int] = {}  # of each complete node, in the same way

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        before = self._length
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if alias is None:
            self._length += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
            self._lengths[node] = self._length - before
            return node
        length = self._lengths.get(node)
        if length is None:
            raise yaml.composer.ComposerError(problem="an alias within its own value", problem_mark=alias.start_mark)
        self._length += length
        self._aliased += length
        if self._aliased > _MAX_ALIASED:
            raise yaml.composer.ComposerError(
                problem=f"aliases of more than {_MAX_ALIASED:,} characters", problem_mark=alias.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    problem="the key <<, which is not supported", problem_mark=key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            lacks_value = isinstance(value_node, yaml.ScalarNode) and value_node.start_mark == value_node.end_mark
            if lacks_value and isinstance(key, str) and key_node.style is None and _JOINED.match(key):
                raise yaml.constructor.ConstructorError(
                    problem="a name without a value ({name:value} needs a blank behind the colon)",
                    problem_mark=key_node.start_mark,
                )
            if isinstance(key, Hashable) and key in seen:
                shown = hide_secrets(key) if isinstance(key, str) and _NAME.fullmatch(key) else "…"
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {shown} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        return str(self.construct_scalar(node))

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        if len(text) > _MAX_NUMBER:
            raise yaml.constructor.ConstructorError(
                problem=f"a number of more than {_MAX_NUMBER} characters", problem_mark=node.start_mark
            )
        if node.tag.endswith(":float"):
            return self.construct_yaml_float(node)
        number = self.construct_yaml_int(node)
        if number.bit_length() > 64:
            raise yaml.constructor.ConstructorError(
                problem="an integer of more than 64 bits", problem_mark=node.start_mark
            )
        return number


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _StrictLoader.construct_number)
_StrictLoader.add_constructor("tag:yaml.org,2002:timestamp", _StrictLoader.construct_text)


def _parse(text: str, where: str) -> Any:
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{where}: expected at most {MAX_LENGTH:,} characters of YAML, got more. Shorten it")
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 (a SafeLoader)
    except Exception as e:  # noqa: BLE001 - also of the loader's own conversions: ValueError for the number 0x_
        # str(e) would quote the text, which may contain a credential.
        mark = getattr(e, "problem_mark", None)
        at = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = _QUOTED.sub("…", getattr(e, "problem", None) or "other text")
        raise ConfigError(f"{where}:{at} expected YAML, got: {problem}. Correct the text there") from None


def _texts(text: str) -> list[str]:
    """Return the scalars of YAML, and the text outside of them: comments, anchors and tags, which no value has."""
    loader = _StrictLoader(text)
    scalars, outside, at = [], [], 0
    while loader.check_token():
        token = loader.get_token()
        if isinstance(token, yaml.ScalarToken):
            scalars.append(token.value)
            begin, end = token.start_mark.index, token.end_mark.index
            header = text[begin:end].splitlines()[0] if token.style in ("|", ">") else ""  # may have a comment
            outside.append(text[at:begin] + header)
            at = end
    return [*scalars, " ".join([*outside, text[at:]])]


def _override(settings: dict[str, Any], override: str, within: tuple[str, ...] = ()) -> None:
    """Set ``override``, as ``key.sub=value``, in ``settings``. ``within``: names of the enclosing settings."""
    name, equals, text = override.partition("=")
    refuse_on_command_line(name, (*within, "…"))  # errors show the name
    path = tuple(name.strip().split("."))
    if not equals or not _NAME.fullmatch(name.strip()):
        # Only a name is shown: another text may be a credential.
        came = repr(name.strip()) if equals and len(name) <= 40 and "://" not in name else "another text"
        raise ConfigError(f"expected an override as key.sub=value, got {came}. Write e.g. engine_kwargs.dtype=float32")
    value = text if is_env_reference(text) else _parse(text, name)
    refuse_on_command_line(value, (*within, *path))
    refuse_on_command_line([] if value is text else _texts(text), ("…",))
    here = settings
    for i, part in enumerate(path[:-1]):
        inner = here.get(part)
        if inner is not None and not isinstance(inner, Mapping):
            raise ConfigError(
                f"{name}: expected {'.'.join(path[: i + 1])} to be a mapping, got a {type(inner).__name__}. "
                "Give the whole mapping"
            )
        # A copy: an alias of YAML makes one mapping the value of two settings. Python code keeps its own mapping.
        here[part] = inner = dict(inner or {})
        here = inner
    here[path[-1]] = value


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{k: _merged(old.get(k), v) for k, v in new.items()}}
    return new


def _with_env(value: Any, path: tuple[str, ...], found: set[str]) -> Any:
    """Return ``value`` with every ``${env:NAME}`` replaced. Adds the inserted values to ``found``."""
    if isinstance(value, Mapping):
        return {k: _with_env(v, (*path, str(k)), found) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_env(v, path, found) for v in value]
    if not isinstance(value, str) or "${env:" not in value:
        return value

    def replace(m: re.Match[str]) -> str:
        name = m.group(1).strip()
        if name not in os.environ:
            raise ConfigError(
                redact_text(
                    f"{'.'.join(path)}: expected the environment variable {name!r} to be set, got nothing. Export it "
                    "where the driver runs, or remove the reference"
                )
            )
        found.add(os.environ[name])
        return os.environ[name]

    out = _ENV.sub(replace, value)
    if "${env:" in _ENV.sub("", value):
        shown = redact_text(".".join(path))
        raise ConfigError(f"{shown}: expected ${{env:NAME}}, got one without its closing brace. Close it")
    return out
