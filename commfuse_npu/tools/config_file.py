"""Reads YAML configuration files: plain data, with each key once.

PyYAML's safe loader builds no objects, but of a key that is there twice it silently takes the last
value.  Here that is an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

try:
    import yaml
except ImportError as error:
    raise ImportError(
        f"PyYAML is not installed for {sys.executable}; pip install pyyaml, or take the Python "
        "that MindSpeed runs with (the launchers: PYTHON=...)"
    ) from error

from commfuse_npu.launch.did_you_mean import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE.parent / "configs", _PACKAGE / "configs")
"""In a checkout; in an installed wheel, inside the package."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in keys:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{key.value!r} is there twice", key.start_mark
                        )
                    keys.add(key.value)
        return super().construct_mapping(node, deep)


class ConfigError(ValueError):
    """A configuration cannot be found or read, or is invalid; one line per problem."""


def find_config(name: str, folder: str = "") -> Path:
    """The path of a file: ``name`` is a path, or the name of a file in ``configs/<folder>``.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name)
    if os.path.isfile(name):  # False, not an error, if the name is too long
        return path
    directory = next((root for root in _FOLDERS if root.is_dir()), _FOLDERS[0]) / folder
    shipped = directory / f"{path.stem}.yaml"
    if path.parent == Path() and os.path.isfile(shipped):
        return shipped
    names = sorted(path.stem for path in directory.glob("*.yaml"))
    raise ConfigError(
        f"{name!r} is neither a file nor one of {', '.join(names) or 'no names'} in {directory}"
        f"{did_you_mean(path.stem, names)}"
    )


def read_config(path: Path) -> dict[Any, Any]:
    """The mapping in a file; its values are YAML's plain types, lists and mappings.

    Raises:
        ConfigError: the file cannot be read, or is not valid; the message names file and line.
    """
    try:
        document = yaml.load(path.read_text("utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    # ValueError: an invalid date, as 2026-99-99; RecursionError: a list in a list in a list ...
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)
        message = f"line {mark.line + 1}: {problem}" if mark and problem else str(error)
        raise ConfigError(f"{path} is not valid yaml: {' '.join(message.split())}") from error
    if not isinstance(document, dict):
        kind = "nothing" if document is None else type(document).__name__
        raise ConfigError(f"{path} holds {kind}, not a mapping of name: value")
    return document
