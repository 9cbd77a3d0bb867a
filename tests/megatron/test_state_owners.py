"""State of packages that a pass runs is looked at, wherever it is kept."""

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from mindspeed_patches.fb_overlap.state_owners import state_owners

KNOWN, PATCHING, HOOKING = "megatron.of_a_test", "package_that_patches", "package_that_hooks"
PATCHES = """
import functools

class Kept:
    def __init__(self, *parts):
        self.parts = parts

class Registry:
    instances = [Kept()]
    by_name = {"a layer": (Kept(Kept()),)}

current = Kept()

def patch(own):
    calls = 0

    @functools.wraps(own)
    def wrapped(*args):
        nonlocal calls
        calls += 1
        return own(*args)

    return classmethod(functools.partial(wrapped))
"""
HOOK = """
class State:
    last = None

def hook(layer, inputs):
    State.last = inputs
"""


def module(name: str, source: str) -> Any:
    made = ModuleType(name)
    exec(source, vars(made))
    return made


def test_state_of_patches_and_hooks_is_looked_at() -> None:
    known = module(KNOWN, "class Router:\n    def routing(self, x):\n        return x\n")
    patching, hooking = module(PATCHING, PATCHES), module(HOOKING, HOOK)
    known.Router.routing = patching.patch(known.Router.routing)
    layer = torch.nn.Identity()
    layer.register_forward_pre_hook(hooking.hook)
    modules = {KNOWN: known, PATCHING: patching, HOOKING: hooking}
    with mock.patch.dict(sys.modules, modules):
        found = state_owners([torch.nn.Sequential(layer)], [], [])
        held = patching.Registry.by_name["a layer"][0]
        for owner in (
            *(patching, patching.Registry, patching.current, patching.Registry.instances[0]),
            *(held, held.parts[0], hooking, hooking.State),
        ):
            assert any(one is owner for one in found.values()), owner
        known.Router().routing(1)
        closures = [one for name, one in found.items() if name.endswith("closure")]
        (closure,) = (one for one in closures if hasattr(one, "__dict__") and "calls" in vars(one))
        assert closure.calls == 1
        closure.calls = 7
        known.Router().routing(1)
        assert closure.calls == 8


def test_state_of_libraries_is_not_looked_at() -> None:
    layer = torch.nn.Identity()
    layer.group, layer.library = torch.Generator(), mock.Mock()
    known, counting = module(KNOWN, ""), module(PATCHING, PATCHES)
    # As a tool that counts collectives.
    known.imported = counting.patch(torch.nn.functional.relu).__func__.func
    with mock.patch.dict(sys.modules, {KNOWN: known, PATCHING: counting}):
        found = state_owners([layer], [torch.nn.functional.relu], [])
    assert known in found.values()
    assert counting not in found.values()
    assert layer.group not in found.values()
    assert layer.library not in found.values()
    assert not [name for name in found if name.startswith(("torch", "unittest", "numpy"))]
