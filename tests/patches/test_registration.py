"""``install()`` against the life cycle of MindSpeed and MindSpeed-LLM, with stand-ins."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.tensor_parallel import layers

from commfuse_npu.launch.packages import Package
from mindspeed_patches import launch, registration

STAND_INS = Path(__file__).parent / "stand_ins"
MEGATRON_FORWARD = layers.ColumnParallelLinear.forward
COMMAND = ["pretrain_gpt.py", "--tensor-model-parallel-size", "2", "--sequence-parallel"]


def forget() -> None:
    """Remove the stand-ins from ``sys.modules``, and what the feature knows of a launch."""
    patches = sys.modules.get("mindspeed.patch_utils")
    if patches is not None:
        patches.MindSpeedPatchesManager.remove_patches()
    for name in list(sys.modules):
        if name.split(".")[0] in ("mindspeed", "mindspeed_llm"):
            del sys.modules[name]
    registration.FEATURE.wrappers = None
    importlib.invalidate_caches()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``command(*options)`` sets ``sys.argv``; the stand-ins are on the path."""
    forget()
    monkeypatch.syspath_prepend(STAND_INS)

    def typed(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", [*COMMAND, *options])

    typed("--use-commfuse")
    yield typed
    forget()


def wrapped() -> int:
    """How many times Megatron's column-parallel forward is wrapped."""
    count, function = 0, layers.ColumnParallelLinear.forward
    while function is not MEGATRON_FORWARD:
        count, function = count + 1, function.__wrapped__
    return count


ADAPTORS = [
    ("mindspeed_llm", "own_of_llm", "mindspeed_llm.tasks.megatron_adaptor_v2"),
    ("mindspeed.megatron_adaptor", "own_of_mindspeed", "mindspeed.megatron_adaptor"),
]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(("package", "own", "adaptor"), ADAPTORS)
def test_installed_before_mindspeed(command, package: str, own: str, adaptor: str, on) -> None:
    command(*("--use-commfuse", "--commfuse-layers", "qkv,fc1")[: 3 * on])
    feature = registration.install()
    importlib.import_module(package)
    assert adaptor in sys.modules
    assert wrapped() == on
    assert registration.install() is feature
    assert wrapped() == on
    manager = importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager
    manager.set_features_list([*manager.FEATURES_LIST])
    names = [feature.feature_name for feature in manager.FEATURES_LIST]
    assert names == [own, "use_commfuse"]
    wrappers = feature.wrappers
    assert wrappers.layers == {"qkv", "fc1"} if wrappers is not None else not on


@pytest.mark.parametrize(("package", "own", "adaptor"), ADAPTORS)
def test_after_mindspeed_it_is_too_late(command, package: str, own: str, adaptor: str) -> None:
    importlib.import_module(package)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"too late: {adaptor} is imported.*; call it after"):
            registration.install()
    manager = importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager
    assert [feature.feature_name for feature in manager.FEATURES_LIST] == [own]
    assert wrapped() == 0


def test_versions_that_nothing_can_be_added_to_are_refused(command, tmp_path, monkeypatch) -> None:
    found = {"megatron": Package("0.17.0", (Path("/megatron"),))}
    with monkeypatch.context() as patch:
        patch.setattr(registration, "find_package", lambda name, _: found.get(name))
        with pytest.raises(RuntimeError, match=r"core 0\.17\.0 in /megatron: from 0\.17 .*2\.3\.0"):
            registration.install()
    (tmp_path / "mindspeed_llm" / "tasks").mkdir(parents=True)
    (tmp_path / "mindspeed_llm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"is 2\.1\.0 or older: it has no feature manager.*use "):
        registration.install()


def test_a_missing_mindspeed_is_named(tmp_path, monkeypatch) -> None:
    forget()
    if importlib.util.find_spec("mindspeed") is not None:
        pytest.skip("MindSpeed is installed here")
    with pytest.raises(RuntimeError, match=r"needs MindSpeed on the Python path, .*2\.2"):
        registration.install()
    package = tmp_path / "mindspeed" / "features_manager"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        registration.install()
    forget()


SCRIPT = """
import sys
import helper_beside_the_script
import mindspeed_llm
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
fused = hasattr(ColumnParallelLinear.forward, "__wrapped__")
helper_beside_the_script.found.append((__name__, sys.argv, fused))
"""


@pytest.mark.parametrize("options", [["--use-commfuse", "--commfuse-chunks=2"], ["--use-comfuse"]])
def test_a_script_is_launched_as_if_it_were_started(
    command, tmp_path, monkeypatch, options
) -> None:
    monkeypatch.setattr(sys, "path", ["replaced by the script's folder", *sys.path])
    (tmp_path / "helper_beside_the_script.py").write_text("found = []\n")
    monkeypatch.delitem(sys.modules, "helper_beside_the_script", raising=False)
    (tmp_path / "pretrain.py").write_text(SCRIPT)
    words = [str(tmp_path / "pretrain.py"), "--seq-length", "64", *options]
    launch.main(words)
    records = sys.modules["helper_beside_the_script"].found
    assert records == [("__main__", words, "--use-commfuse" in options)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"usage: torchrun .* SCRIPT"),
        ("--use-commfuse pretrain_gpt.py", r"usage: torchrun .* SCRIPT"),
        ("absent.py", r"there is no script absent\.py in .*; run it"),
        (f"{__file__} --commfuse-lane 2", "unknown: --commfuse-lane; did you mean --commfuse-l"),
        (f"{__file__} --commfuse-wgrad blocks", "was removed: a weight gradient is one GEMM"),
        (f"{__file__} --commfuse_chunks=2", "chunks; did you mean --commfuse-chunks"),
        (f"{__file__} --no-commfuse-attentions", "did you mean --no-commfuse-attention?"),
    ],
)
def test_commands_that_are_refused(words: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        launch.main(words.split())
