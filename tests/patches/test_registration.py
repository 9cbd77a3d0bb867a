"""``install()`` against the life cycle of MindSpeed and MindSpeed-LLM, played by stand-ins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.tensor_parallel import layers

from commfuse_npu.packages import Package
from mindspeed_patches import launch, registration
from mindspeed_patches.refusals import IncompatibleOptionsError

STAND_INS = Path(__file__).parent / "stand_ins"
MEGATRON_FORWARD = layers.ColumnParallelLinear.forward
COMMAND = ["pretrain_gpt.py", "--tensor-model-parallel-size", "2", "--sequence-parallel"]


def forget() -> None:
    """Leave no trace of the stand-ins, nor of the feature that was built on them."""
    patches = sys.modules.get("mindspeed.patch_utils")
    if patches is not None:
        patches.MindSpeedPatchesManager.remove_patches()
    for name in list(sys.modules):
        if name.split(".")[0] in ("mindspeed", "mindspeed_llm"):
            del sys.modules[name]
    for name in ("mindspeed_patches.feature", "mindspeed_patches.fb_overlap.feature"):
        sys.modules.pop(name, None)
    registration._features.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``command(*options)`` is what the user typed; the stand-ins are on the path."""
    forget()
    monkeypatch.syspath_prepend(STAND_INS)

    def typed(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", [*COMMAND, *options])

    typed("--use-commfuse")
    yield typed
    forget()


def features() -> list[str]:
    manager = importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager
    return [feature.feature_name for feature in manager.FEATURES_LIST]


def wrapped() -> int:
    """How many times Megatron's column-parallel forward is wrapped."""
    count, function = 0, layers.ColumnParallelLinear.forward
    while function is not MEGATRON_FORWARD:
        count, function = count + 1, function.__wrapped__
    return count


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    ("package", "own"),
    [("mindspeed_llm", "own_of_llm"), ("mindspeed.megatron_adaptor", "own_of_mindspeed")],
)
@pytest.mark.parametrize("when", ["before", "after", "before and after", "twice after"])
def test_installed_before_or_after_mindspeed(command, when: str, package, own, on: bool) -> None:
    """After, the options were parsed before anybody declared them."""
    command(*("--use-commfuse", "--commfuse-layers", "qkv,fc1")[: 3 * on])
    if "before" in when:
        feature = registration.install()
    importlib.import_module(package)
    assert wrapped() == (on and "before" in when)
    for _ in range(when.count("after") + when.count("twice")):
        feature = registration.install()
    assert wrapped() == on
    assert features() == [own, "use_commfuse", "commfuse_fb_overlap"]
    assert registration.install() is feature
    found = feature.wrappers
    assert found.layers == {"qkv", "fc1"} if found is not None else not on


@pytest.mark.parametrize("version", ["0.17.0", "0.18.0rc1", "1.0"])
def test_a_megatron_that_others_adapt_is_refused(command, monkeypatch, version: str) -> None:
    found = Package(version, (Path("/megatron"),))
    monkeypatch.setattr(registration, "find_package", lambda *_: found)
    with pytest.raises(RuntimeError) as error:
        registration.install()
    assert str(error.value).startswith(f"Megatron core {version} in /megatron: from 0.17 on its ")
    assert "use MindSpeed-LLM 2.2.0, 2.3.0, 26.0.0, 26.1.0 or master" in str(error.value)


@pytest.mark.parametrize("late", [False, True])
def test_features_that_replace_the_layers_are_refused_at_patch_time(command, late: bool) -> None:
    command("--use-commfuse", "--use-ascend-coc")
    refusal = pytest.raises(
        IncompatibleOptionsError, match="--use-commfuse and --use-ascend-coc exclude each other"
    )
    if late:
        importlib.import_module("mindspeed_llm")
        with refusal:
            registration.install()
    else:
        registration.install()
        with refusal:
            importlib.import_module("mindspeed_llm")
    assert wrapped() == 0


def test_mindspeed_llm_2_1_0_is_refused(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS / "old_llm")
    with pytest.raises(RuntimeError, match=r"is 2\.1\.0 or older: it has no feature manager.*use "):
        registration.install()


def test_without_mindspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    if importlib.util.find_spec("mindspeed") is not None:
        pytest.skip("MindSpeed is installed here")
    with pytest.raises(
        RuntimeError, match=r"the feature needs MindSpeed on the Python path, .*2\.2"
    ):
        registration.install()


def test_a_module_that_mindspeed_itself_misses_is_reported_as_it_is(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mindspeed" / "features_manager"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        registration.install()


class TestLaunch:
    """``-m mindspeed_patches.launch script``."""

    SCRIPT = """
import sys
import helper_beside_the_script
import mindspeed_llm
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
found = [__name__, sys.argv, hasattr(ColumnParallelLinear.forward, "__wrapped__")]
"""

    def run(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
        script = folder / "pretrain.py"
        script.write_text(self.SCRIPT + "helper_beside_the_script.found.append(found)\n")
        (folder / "helper_beside_the_script.py").write_text("found = []\n")
        monkeypatch.delitem(sys.modules, "helper_beside_the_script", raising=False)
        monkeypatch.setattr(sys, "path", ["replaced by the script's folder", *sys.path])
        launch.main([str(script), *options])
        return sys.modules["helper_beside_the_script"].found[0]

    @pytest.mark.parametrize("options", [("--use-commfuse",), ()])
    def test_runs_the_script_as_if_it_were_started(
        self, command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
    ) -> None:
        name, argv, fused = self.run(tmp_path, monkeypatch, "--seq-length", "64", *options)
        assert name == "__main__"
        assert argv == [str(tmp_path / "pretrain.py"), "--seq-length", "64", *options]
        assert fused == bool(options)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], r"usage: torchrun .* SCRIPT"),
            (["--use-commfuse", "pretrain_gpt.py"], r"usage: torchrun .* SCRIPT"),
            (["absent.py"], r"there is no script absent\.py in .*; run it"),
        ],
    )
    def test_the_script_comes_first(self, arguments: list[str], message: str) -> None:
        with pytest.raises(SystemExit, match=message):
            launch.main(arguments)

    @pytest.mark.parametrize(
        ("word", "meant"),
        [
            ("--commfuse-lane", "--commfuse-lanes"),
            ("--commfuse_chunks=2", "--commfuse-chunks"),
            ("--use-commfused", "--use-commfuse"),
            ("--commfuse-fb-overlaps", "--commfuse-fb-overlap"),
            ("--no-commfuse-attentions", "--no-commfuse-attention"),
            ("--use-comfuse", None),  # Megatron's to refuse
            ("--no-use-commfuse", None),
            ("--commfuse-chunks=2", None),
            ("--commfuse-fb-overlap-memory", None),
        ],
    )
    def test_options_that_look_like_ours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, meant: str | None
    ) -> None:
        monkeypatch.setattr(sys, "path", ["replaced by the script's folder", *sys.path])
        monkeypatch.setattr(sys, "argv", sys.argv)
        script = tmp_path / "pretrain_gpt.py"
        script.write_text("started = True\n", "utf-8")
        words = [str(script), "--num-layers", "2", word, "2"]
        if meant is None:
            launch.main(words, prepare=lambda: None)
            return
        message = rf"unknown: {word.split('=')[0]}; did you mean {meant}\?"
        with pytest.raises(SystemExit, match=message):
            launch.main(words, prepare=lambda: None)
