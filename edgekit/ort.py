"""ONNX Runtime with its telemetry off.

Its official builds queue device and usage data for Microsoft from the first import on. What a user runs on a device is
nobody's business, so the switch is set before the import; `ORT_DISABLE_TELEMETRY=0` in the environment overrides it.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

__all__ = ["ort"]
