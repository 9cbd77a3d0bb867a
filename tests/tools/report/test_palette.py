"""No two lines of a picture look the same, and everything can be read in light and dark."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.report.palette import DARK, LIGHT, color, looks, on_paper
from commfuse_npu.tools.simulate.variants import variants


def test_no_two_variants_look_the_same() -> None:
    names = [variant.name for variant in variants(8, 8, 7)]
    found = looks(names, [name for name in names if name.startswith("commfuse")])
    assert list(found) == names
    # The legend shows these two.
    assert len({(look.color, look.shape) for look in found.values()}) == len(names) > 15


def test_a_few_differ_in_color_and_in_shape() -> None:
    found = looks(["plain-mesh", "megatron", "coc-4", "mc2", "commfuse-c4-l7"], ["commfuse-c4-l7"])
    assert len({look.color for look in found.values()}) == 5
    assert len({look.shape for look in found.values()}) == 5
    assert found["megatron"].color == "orange"
    assert found["commfuse-c4-l7"].color == "blue"
    assert found["commfuse-c4-l7"].dash == (1, 0)


def test_more_than_can_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="1000 lines are more than can be told apart"):
        looks([str(number) for number in range(1000)])


def _luminance(value: str) -> float:
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(colors: dict[str, str]) -> None:
    """WCAG 2: 4.5 for text, 3 for what is drawn."""
    for name in ("ink", "faint", "blue", "orange"):
        assert _contrast(colors[name], colors["paper"]) >= 4.5, name
    for name in ("grey", "green", "purple", "pink", "teal", "olive", "red"):
        assert _contrast(colors[name], colors["paper"]) >= 3, name
    assert _contrast(colors["ink"], colors["shade"]) >= 4.5  # the verdict
    # The ms of waiting, on red.
    assert _contrast(colors["paper"], colors["red"]) >= 4.5


def test_a_file_without_css_has_the_colors_themselves() -> None:
    assert (
        on_paper(f'"{color("blue")}", "{color("ink")}"') == f'"{LIGHT["blue"]}", "{LIGHT["ink"]}"'
    )
    assert LIGHT.keys() == DARK.keys()
