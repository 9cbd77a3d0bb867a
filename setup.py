"""Packaging: commfuse_npu with the shipped configurations inside, and mindspeed_patches."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "commfuse_npu/__init__.py").read_text("utf-8"), re.M
)
assert VERSION is not None

setup(
    name="commfuse-npu",
    version=VERSION[1],
    description="Communication hidden behind computation, for training on Ascend NPUs",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["commfuse_npu*", "mindspeed_patches*"]),
        "commfuse_npu.configs",
        "commfuse_npu.configs.hardware",
    ],
    package_dir={"commfuse_npu.configs": "configs"},
    package_data={
        "commfuse_npu": ["py.typed"],
        "commfuse_npu.configs": ["*.yaml"],
        "commfuse_npu.configs.hardware": ["*.yaml"],
        "mindspeed_patches": ["py.typed"],
    },
    entry_points={"console_scripts": ["commfuse-npu=commfuse_npu.tools.cli:main"]},
    # torch is not required: a bare requirement would replace the torch that torch_npu is built for,
    # or bring in CUDA.  Take it from an extra or from the system.
    install_requires=["pyyaml"],
    extras_require={
        # megatron-core needs numpy, and does not name it.
        "cpu": ["torch==2.13.0", "megatron-core==0.12.1", "einops", "numpy", "packaging"],
        "npu": ["torch==2.7.1", "torch-npu==2.7.1"],
        # What draws pictures.
        "tools": ["vl-convert-python>=1.9"],
    },
)
