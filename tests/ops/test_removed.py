"""What this version does not have is refused by name, with what to use in its place."""

import pytest

from commfuse_npu import ops, plan
from commfuse_npu.removed import REMOVED, removed

NAMES = [name for name in REMOVED if name.isidentifier()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("module", ["commfuse_npu.ops", "commfuse_npu.plan"])
def test_importing_a_removed_name_tells_the_way_out(module: str, name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from {module} import {name}")
    assert str(caught.value) == f"{module}: {name} was removed: {REMOVED[name]}"


def test_other_missing_names_are_ordinary_errors() -> None:
    assert removed("anything") == ""
    for module in (ops, plan):
        with pytest.raises(AttributeError, match="has no attribute 'anything'"):
            _ = module.anything
