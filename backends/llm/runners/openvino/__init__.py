"""The model runner for CPUs: OpenVINO's paged attention over block tables and cache tensors that we own."""

from __future__ import annotations

from backends.llm.runners.openvino.runner import OpenVinoRunner

__all__ = ["OpenVinoRunner"]
