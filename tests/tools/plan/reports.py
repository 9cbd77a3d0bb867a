"""What holds for the JSON of every plan of a launch: verdict, table and figures agree."""

from __future__ import annotations

from typing import Any

import pytest


def typical(form: dict[str, Any]) -> float:
    """Seconds of a step in a form; infinite if it is not simulated."""
    return form["seconds"]["typical"] if form["seconds"] else float("inf")


def assert_consistent(report: dict[str, Any]) -> None:
    """The best form is the fastest that can be launched and fits, by a hundredth, and the verdict
    names its flags, its share of the present time and its memory."""
    forms = {form["name"]: form for form in report["forms"]}
    best = forms[report["best"]]
    now = next(form for form in forms.values() if form["used"])
    reference = forms[report["reference"]]
    assert not any(flag in now["change"] for flag in now["flags"].split()), now
    if report["problems"]:
        assert report["problems"][0] in report["verdict"]
        return
    for form in forms.values():
        reason = form["obstacle"] or form["remark"]
        assert form["seconds"] or reason, form
        zero = form["less_time"] is not None and form["less_time"]["typical"] == 0
        assert form is reference or not zero or reason, form
        assert form["fits"] == ((form["memory_bytes"] or 0) <= report["usable_bytes"])
    timed = [form for form in forms.values() if form["seconds"] and not form["obstacle"]]
    most = 1.1 * (reference["memory_bytes"] or 0)
    fitting = [form for form in timed if form["fits"]]
    fitting = fitting or [form for form in timed if form["memory_bytes"] <= most]
    if not timed:
        return
    assert best is now or best in fitting
    fastest = min(map(typical, fitting))
    if best is now:
        assert report["verdict"].startswith("Nothing to change.")
        assert not now["fits"] or not now["seconds"] or 0.99 * typical(now) <= fastest
        faster = [f["name"] for f in timed if f is not now and typical(f) < typical(reference)]
        assert all(name[1:] in report["verdict"] for name in faster), faster
        return
    fewer = [f for f in fitting if f["flags"] and {*f["flags"].split()} < {*best["flags"].split()}]
    assert all(typical(best) <= 0.99 * typical(form) for form in fewer)
    # Another one may be faster by less than a hundredth, with more options.
    assert 0.99 * typical(best) <= fastest
    less = 1 - typical(best) / typical(reference)
    assert report["saved"]["typical"] == pytest.approx(less)
    assert f" takes {100 * less:.1f} %" in report["verdict"]
    assert best["change"][1:] in report["verdict"]
    more = (best["memory_bytes"] - reference["memory_bytes"]) / 2**30
    assert f"{more:+.1f} GiB" in report["verdict"]
    assert ("no form fits" in report["verdict"]) != best["fits"]
