"""Where in the user's code a node came from, and the error of what cannot be captured there."""

from __future__ import annotations

import re

from torch import fx

from ..kernels.errors import AutospError


class CaptureError(AutospError):
    """The model does not become one graph; the message carries Dynamo's reason and the user's line."""


def source_line(node: fx.Node) -> str:
    """The user's own line a node came from: `file:line in function: code`."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s+(.*)', node.meta.get("stack_trace") or "")
    frames = [f for f in frames if "/torch/" not in f[0] and f[2] != "__torch_function__"] or frames
    if not frames:
        return "(no source line)"
    path, line, function, code = frames[-1]
    return f"{path}:{line} in {function}: {code.strip()}"
