"""A MaxText configuration as one mapping: the file, its base files, its model's file, and overrides."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from meshlib.core.errors import GraphError, MissingError, nearest
from meshlib.core.files import open_file
from meshlib.models.maxtext.keys import DEFAULT_RULES, KNOWN, READ, REFUSED, UNREAD, LogicalRule
from meshlib.models.maxtext.versions import FIRST_BLOCK, is_base, renamed, serving_sign

WHAT = "read_maxtext"
OVERRIDES = "overrides"
RULES = "logical_axis_rules"
MOST_BYTES = 4 * 2**20  # base.yml has 80 kB
MOST_VALUES, MOST_DEPTH = 100_000, 64
_EXPONENT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")  # YAML 1.1 reads 1e-6 as text, MaxText as a number
MOST_FILES = 16  # length of a chain of base_config
DEPTH = 4  # parent folders in which base files are looked for


@dataclass(frozen=True)
class Settings:
    """Values by key with their sources, and the name of the configuration.

    `values` has the keys set by files and overrides; others have MaxText's defaults, see `meshlib.models.maxtext.keys`.
    `sources` has for each key the name of a file, or "overrides". `serving`: the file, key and value that request
    inference, if any. `foreign`: keys of its base.yml that are of another version of MaxText, with their values there.
    """

    path: str
    values: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[LogicalRule, ...] = DEFAULT_RULES
    serving: tuple[str, str, Any] | None = None
    foreign: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        value = self.values.get(key, READ[key])
        return READ[key] if value is None and READ[key] is not None else value

    def where(self, key: str) -> str:
        """The name of the file that sets a key, or with "(an override)" for overrides."""
        source = self.sources.get(key)
        name = os.path.basename(self.path)
        return f"{name} (an override)" if source == OVERRIDES else source or f"{name} (a default)"

    def fail(self, key: str, rule: str, value: Any = ...) -> NoReturn:
        """Raise GraphError with file, key, value and rule in one line."""
        given = self[key] if value is ... else value
        raise GraphError(f"{WHAT}: {self.where(key)}: {key}={_text(given)}: {rule}")

    def size(self, key: str, low: int = 1) -> int:
        """The value of a key as an integer of at least `low`."""
        value = self[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            self.fail(key, f"must be a whole number of at least {low}")
        return value

    def number(self, key: str) -> float:
        """The value of a key as a number."""
        value = self[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) > 1e300:
            self.fail(key, "must be a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """The value of a key as a bool."""
        value = self[key]
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def choice(self, key: str, options: Sequence[str]) -> str:
        """The value of a key as one of the given words."""
        value = self[key]
        if not isinstance(value, str) or value not in options:
            hint = nearest(value, options) if isinstance(value, str) else ""
            self.fail(key, f"must be one of {', '.join(o or repr(o) for o in options)}{hint}")
        return value


def _text(value: Any) -> str:
    """A value in the syntax of MaxText's command line."""
    return f"{value!r:.200}" if isinstance(value, list | dict) else f"{value}"[:200]


def parsed(texts: Sequence[str]) -> dict[str, Any]:
    """Overrides from the `KEY=VALUE` arguments of a MaxText command line, with values as YAML.

    Raises: GraphError for an argument without "=", a key that is given twice with different values, and a value that
      is not YAML; MissingError without PyYAML.
    """
    overrides: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise GraphError(f"{WHAT}: an override must be KEY=VALUE, such as steps=2, got {text!r:.80}")
        value_read = _yaml(value, f"override {key}={value[:60]}")
        if key in overrides and overrides[key] != value_read:
            raise GraphError(f"{WHAT}: override {key} is given twice: {_text(overrides[key])} and {_text(value_read)}")
        overrides[key] = value_read
    return overrides


def settings_of(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    models: str | os.PathLike[str] | None = None,
) -> Settings:
    """Read a configuration.

    Args:
      path: base.yml, a file with `base_config`, or a folder with base.yml.
      overrides: values by key, as on the command line; text is read as YAML.
      models: the folder of model files; by default `models` beside the file or beside its folder.
    Raises: GraphError for a missing or damaged file, an unknown key, an unknown model, and keys that both a model and
      an override set without `override_model_config`.
    """
    place = Path(os.fspath(path))
    if place.is_dir():
        place = place / "base.yml"
    given = renamed(_overrides(overrides))
    chain = _chain(place)
    root = chain[-1][1]
    foreign = {k: _plain(v) for k, v in root.items() if k not in KNOWN} if is_base(root) else {}
    values: dict[str, Any] = {"decoder_block": FIRST_BLOCK} if is_base(root) else {}
    sources: dict[str, str] = {}
    rules: list[Any] = [*DEFAULT_RULES]
    for file, entries in reversed(chain):
        rules = _merged(rules, entries, file.name)
        values |= entries
        sources |= dict.fromkeys(entries, file.name)
    folders = [Path(os.fspath(models))] if models is not None else [folder / "models" for folder in _folders(place)]
    for file, entries in _model(place, {**values, **given}, folders, given):
        rules = _merged(rules, entries, file.name)
        values |= entries
        sources |= dict.fromkeys(entries, file.name)
    rules = _merged(rules, given, f"{place.name} (an override)")
    values |= given
    sources |= dict.fromkeys(given, OVERRIDES)
    plain = {k: _plain(v) for k, v in values.items()}
    settings = Settings(str(place), plain, sources, serving=serving_sign(chain, given), foreign=foreign)
    _check(settings)
    return _with_rules(settings, rules, folders)


def _plain(value: Any) -> Any:
    """A value, with None for the word."""
    return None if isinstance(value, str) and value.lower() == "none" else value


def _overrides(given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise GraphError(f"{WHAT}: overrides must be a dict of keys to values, got {given!r:.80}")
    return {k: _yaml(v, f"override {k}={v[:60]}") if isinstance(v, str) else v for k, v in given.items()}


def _chain(place: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file, followed by its base files along `base_config`."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    file: Path | None = place
    while file is not None:
        if any(file.resolve() == before.resolve() for before, _ in chain) or len(chain) == MOST_FILES:
            raise GraphError(f"{WHAT}: {chain[-1][0].name}: base_config={file.name}: the files are based on each other")
        entries = renamed(_read(file))
        chain.append((file, entries))
        base = entries.get("base_config")
        if base in (None, ""):
            return chain
        if not isinstance(base, str):
            raise GraphError(f"{WHAT}: {file.name}: base_config={base!r:.60}: must be the path of a file")
        file = next((one for one in (folder / base for folder in _folders(file)) if one.is_file()), None)
        if file is None:
            raise GraphError(f"{WHAT}: {chain[-1][0].name}: base_config={base}: there is no such file")
    return chain


def _folders(file: Path) -> list[Path]:
    """The folders to which a file's relative paths refer: its own, then its parents up to the depth of MaxText's
    configs."""
    return [file.parent, *list(file.resolve().parent.parents)[:DEPTH]]


def _model(
    place: Path, values: Mapping[str, Any], folders: Sequence[Path], given: Mapping[str, Any]
) -> list[tuple[Path, dict[str, Any]]]:
    """The entries of the model's file, without overridden keys; empty for the model "default"."""
    name = values.get("model_name", "default")
    where = f"{place.name} (an override)" if "model_name" in given else place.name
    if name in (None, "", "default"):
        return []
    if not isinstance(name, str):
        raise GraphError(f"{WHAT}: {where}: model_name={name!r:.60}: must be the name of a model")
    file = next(
        (f for f in (folder / f"{name.replace('-Instruct', '')}.yml" for folder in folders) if f.is_file()), None
    )
    if file is None:
        names = sorted({f.stem for folder in folders if folder.is_dir() for f in folder.glob("*.yml")})
        hint = nearest(name, names) if names else f"; give the folder of model files, models=... (tried {folders[0]})"
        raise GraphError(f"{WHAT}: {where}: model_name={name}: there is no file {name}.yml{hint}")
    entries = renamed(_read(file))
    if values.get("override_model_config") is True:
        return [(file, {k: v for k, v in entries.items() if k not in given or k == RULES})]
    for key in entries:
        if key in given and key not in (RULES, "model_name") and given[key] != entries[key]:
            raise GraphError(
                f"{WHAT}: {place.name} (an override): {key}={_text(given[key])}: {file.name} has "
                f"{_text(entries[key])}; add override_model_config=true to replace it"
            )
    return [(file, entries)]


def _merged(rules: list[Any], entries: Mapping[str, Any], where: str) -> list[Any]:
    """Rules with those of a file added, replacing earlier ones of the same name, or all if the file says so."""
    new = entries.get(RULES)
    if new is None:
        return rules
    if not isinstance(new, list) or not all(isinstance(r, list | tuple) and len(r) == 2 for r in new):
        raise GraphError(f"{WHAT}: {where}: {RULES}={new!r:.60}: must be a list of [name, axes] pairs")
    if entries.get("override_logical_axis_rules") is True:
        return list(new)
    names = {str(rule[0]) for rule in new}
    return [*(r for r in rules if str(r[0]) not in names), *new]


def _with_rules(settings: Settings, rules: list[Any], folders: Sequence[Path]) -> Settings:
    """The settings with their rules as pairs, after a custom mesh has replaced mesh and rules."""
    from_custom = settings["custom_mesh_and_rule"]
    values = dict(settings.values)
    sources = dict(settings.sources)
    if from_custom:
        if not isinstance(from_custom, str):
            settings.fail("custom_mesh_and_rule", "must be the name of a file in custom_mesh_and_rule")
        tried = [folder.parent / "custom_mesh_and_rule" / f"{from_custom}.yml" for folder in folders]
        file = next((f for f in tried if f.is_file()), None)
        if file is None:
            names = sorted({f.stem for t in tried if t.parent.is_dir() for f in t.parent.glob("*.yml")})
            settings.fail("custom_mesh_and_rule", f"there is no file {from_custom}.yml{nearest(from_custom, names)}")
        entries = _read(file)
        for key in ("mesh_axes", "data_sharding"):
            if key in entries:
                values[key], sources[key] = entries[key], file.name
        if RULES in entries:
            rules, sources[RULES] = _merged([], entries, file.name), file.name
    pairs = []
    for rule in rules:
        name, axes = rule
        listed = [axes] if isinstance(axes, str) else [] if axes is None else axes
        if (
            not isinstance(name, str)
            or not isinstance(listed, list | tuple)
            or not all(isinstance(a, str) for a in listed)
        ):
            settings.fail(RULES, f"rule {rule!r:.80} must be [name, axis or list of axes]", rule)
        pairs.append((name, tuple(listed)))
    return replace(settings, values=values, sources=sources, rules=tuple(pairs))


def _check(settings: Settings) -> None:
    """Raise GraphError for keys that MaxText lacks, and for models and steps that this library lacks."""
    for key, value in settings.values.items():
        if key in settings.foreign:
            continue
        if key not in KNOWN:
            where = settings.where(key)
            beside = [k in KNOWN for k in settings.values if settings.sources.get(k) == settings.sources.get(key)]
            hint = nearest(key, KNOWN)
            if len(beside) > 2 and 2 * sum(beside) < len(beside):
                hint = (
                    ", nor most others here; a YAML file is read as MaxText's base.yml: describe the model of another "
                    "trainer by Hugging Face's config.json, or by FILE.py[:function]"
                )
            raise GraphError(f"{WHAT}: {where}: {key}={_text(value)}: MaxText has no key {key!r}{hint}")
        if key in REFUSED and REFUSED[key].requested(value):
            settings.fail(key, f"{REFUSED[key].reason}: {REFUSED[key].instead}", value)
        default = READ.get(key, UNREAD.get(key))
        if default is not None and value is not None:
            _check_type(settings, key, value, default)
        elif value is None and settings.sources.get(key) == OVERRIDES and not isinstance(default, str | None):
            settings.fail(key, f"has no value; MaxText's default is {_text(default)}", "")


_WORDS: Mapping[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def _check_type(settings: Settings, key: str, value: Any, default: Any) -> None:
    kind = type(default)
    fits: Callable[[Any], bool] = {
        bool: lambda v: isinstance(v, bool),
        int: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        float: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        str: lambda v: isinstance(v, str),
        list: lambda v: isinstance(v, list | tuple | str),
    }[kind]
    if not fits(value):
        raise GraphError(f"{WHAT}: {settings.where(key)}: {key}={_text(value)}: must be {_WORDS[kind]}")


# ------------------------------------------------------------ YAML


def _read(file: Path) -> dict[str, Any]:
    with open_file(file, WHAT, GraphError, MOST_BYTES) as (opened, _):
        raw = opened.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise GraphError(f"{WHAT}: {file}: is not UTF-8 text") from None
    entries = _yaml(text, file.name)
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise GraphError(f"{WHAT}: {file.name}: must hold keys and values, one a line, such as base_emb_dim: 2048")
    return entries


def _yaml(text: str, where: str) -> Any:
    """A parsed YAML document. Raises: GraphError for invalid YAML; MissingError without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise MissingError(f"{WHAT} needs PyYAML: pip install 'meshlib-tpu[configs]'") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """PyYAML's loader with errors for duplicate keys, of which a dict would keep the last, and for deep nesting."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > MOST_DEPTH:
                raise GraphError(f"{WHAT}: {where}: is nested deeper than {MOST_DEPTH} levels")
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [str(key.value) for key, _ in node.value]
            twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
            if twice is not None:
                raise GraphError(f"{WHAT}: {where}:{node.start_mark.line + 1}: key {twice!r:.60} occurs twice")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789."])
    loader = None
    try:
        loader = Loader(text)  # reads the first characters
        document = loader.get_single_node()
        if _size(document, {}) > MOST_VALUES:
            raise GraphError(
                f"{WHAT}: {where}: has more than {MOST_VALUES:,} values, with aliases written out; one is within "
                "itself, or many are repeated"
            )
        return None if document is None else loader.construct_document(document)
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = str(getattr(fault, "problem", None) or fault).splitlines()[0]
        raise GraphError(f"{WHAT}: {where}{line}: is not valid YAML: {problem}") from None
    except GraphError:
        raise
    except (RecursionError, ValueError) as fault:
        raise GraphError(f"{WHAT}: {where}: is not valid YAML: {fault}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _size(node: Any, known: dict[int, float]) -> float:
    """The number of values in a YAML node with aliases expanded; infinite for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = node.value if isinstance(getattr(node, "value", None), list) else []
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    return known[id(node)]
