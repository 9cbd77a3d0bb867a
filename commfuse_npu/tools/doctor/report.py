"""Everything that the doctor looks at, and what it prints."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from commfuse_npu.plan import PlanError
from commfuse_npu.tools.doctor.devices import check_devices, listed_npus
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.launch_checks import check_launch
from commfuse_npu.tools.doctor.layers import ATTENTION_OPERATOR, FusedLayer, fused_layers
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.mindspeed_stack import check_stack
from commfuse_npu.tools.doctor.rivals import check_rivals
from commfuse_npu.tools.doctor.torch_install import check_cann, check_torch, check_torch_npu_loads
from commfuse_npu.tools.doctor.transfers import check_transfers

__all__ = ["Report", "diagnose"]


@dataclass(frozen=True)
class Report:
    """All findings, what the launch would fuse, and what all is ready for."""

    findings: tuple[Finding, ...]
    layers: tuple[FusedLayer, ...] = ()
    plan: str = ""
    ready_for: str = ""

    @property
    def ready(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Ready for what; or what is wrong."""
        count = Counter(finding.level for finding in self.findings)
        counted = f"{count['error']} errors, {count['warning']} warnings"
        if self.ready:
            return f"ready: {self.ready_for} ({counted})"
        wrong = dict.fromkeys(one.what for one in self.findings if one.level == "error")
        return f"not ready: {', '.join(wrong)} ({counted})"

    def as_text(self) -> str:
        lines = []
        for section in dict.fromkeys(finding.section for finding in self.findings):
            lines.append(section)
            lines += [f"  {f}" for f in self.findings if f.section == section]
        if self.layers:
            lines.append(f"what is fused, per rank ({self.plan})")
            lines += [f"  {_layer_line(layer)}" for layer in self.layers]
        lines.append(self.verdict)
        return "\n".join(lines)

    def as_json(self) -> str:
        content = {
            "ready": self.ready,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "plan": self.plan,
            "layers": [asdict(layer) for layer in self.layers],
        }
        return json.dumps(content, indent=2)


def _layer_line(layer: FusedLayer) -> str:
    shapes = (layer.input_shape, layer.weight_shape, layer.output_shape)
    x, weight, y = map(list, shapes)
    sizes = f"{layer.layer:<6} {x} x {weight} -> {y}"
    if layer.operator is None:
        return f"{sizes}: Megatron's own forward, because {layer.reason}"
    operator = layer.operator
    if operator == ATTENTION_OPERATOR:
        operator = f"attention and projection as one op {operator}"
    return (
        f"{sizes}: {operator}, {layer.transfers} transfers of "
        f"{layer.transfer_bytes / 2**20:.2f} MB ({layer.transfer_bytes} bytes)"
    )


def diagnose(machine: Machine, launch: Launch | None = None) -> Report:
    """Look at everything."""
    findings = [
        Finding("versions", "Python", "ok", ".".join(map(str, sys.version_info[:3]))),
        *check_torch(machine),
        *check_torch_npu_loads(machine),
        check_cann(machine),
        *check_stack(machine),
        *check_devices(machine, launch),
        *check_variables(machine, launch),
    ]
    npus = len(listed_npus(machine))
    if launch is None:
        here = f"this machine can run CommFuse on {npus} NPUs"
        without = "this machine has no NPU and can run the CPU form, rehearsals and simulations"
        return Report(tuple(findings), ready_for=here if npus else without)
    findings += check_launch(launch)
    if any(finding.what == "layout" and finding.level == "error" for finding in findings):
        return Report(tuple(findings))
    try:
        schedule = launch.schedule
        # Whether it fits the group shows when it is asked for one.
        schedule.hops(0, launch.config.tensor_model_parallel_size, "first")
    except PlanError as error:
        wrong = Finding("launch", "--commfuse-schedule", "error", str(error), "", "choose another")
        return Report((*findings, wrong))
    layers = fused_layers(launch)
    findings += check_transfers(machine, launch, layers)
    findings += check_rivals(machine, launch, schedule)
    here = (
        f"this machine has {npus} NPUs" if npus else "this machine has no NPU and can rehearse it"
    )
    ready_for = f"{_what_is_fused(launch, layers)}; {here}"
    return Report(tuple(findings), tuple(layers), str(schedule), ready_for)


def _what_is_fused(launch: Launch, layers: Sequence[FusedLayer]) -> str:
    fuse = launch.fuse
    named = f"{launch.name} at TP {launch.config.tensor_model_parallel_size}"
    parts = [layer.layer for layer in layers if layer.operator]
    parts += ["Ulysses"] * fuse.commfuse_ulysses + ["data parallelism"] * fuse.commfuse_dp
    if not fuse.use_commfuse or not parts:
        why = layers[0].reason if fuse.use_commfuse else "--use-commfuse is not given"
        return f"{named} would run, but nothing of it is fused: {why}"
    return f"{named} would be fused in {', '.join(parts)}"
