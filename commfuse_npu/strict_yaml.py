"""Configuration files in yaml: plain data, each key once, no larger than a person writes.

yaml's safe loader builds no objects.  It takes other things that only a mistake or an attacker
puts into a configuration: the last of several values of one key, aliases (a few lines of them stand
for gigabytes when they are printed), numbers of any length, nesting without end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

__all__ = ["load"]

_MOST_BYTES = 1 << 18
_MOST_DIGITS = 40


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "aliases are not taken; write the value out", where
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{key.value!r} is there twice", key.start_mark
                        )
                    seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int:
        if len(node.value) > _MOST_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(node.value)} digits", node.start_mark
            )
        return int(self.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


def load(path: Path) -> Any:
    """What the file holds: mappings, lists, texts, numbers, dates, true, false and null.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        yaml.YAMLError: it is no such yaml; the message names the line.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise yaml.YAMLError(f"it is longer than {_MOST_BYTES} bytes")
    text = content.decode("utf-8")
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except ValueError as error:  # 2026-99-99 looks like a date and is none
        raise yaml.YAMLError(str(error)) from error
