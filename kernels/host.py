"""Copies in the host's memory of what backward needs, made while the device computes.

One operator starts a copy, another waits for it, as of collectives. On CUDA a copy runs on a stream of its own, to or from pinned
memory, and relies on this:

- it begins when the device has come to its start, and what reads it stands behind its wait (`wait_stream`, both ways);
- a wait takes the copy's source too, so nobody frees or reuses that before the copy is made;
- a start takes copies that were waited for (`after`), so it stands behind their waits, whoever reorders the graph: what is under
  way at once is bounded.

Elsewhere they are plain copies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """What runs here waits for what the device has been given so far, and nothing waits for it yet."""
    if device.type != "cuda":
        yield
        return
    _stream(device).wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(_stream(device)):
        yield


@torch.library.custom_op("asp::offload", mutates_args=())
def offload(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    """x, dense, in the host's memory, with the same strides. It is there after `wait_copy`."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    with _aside(x.device):
        copy.copy_(x, non_blocking=True)
    return copy


@offload.register_fake
def _(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


@torch.library.custom_op("asp::reload", mutates_args=())
def reload(host: Tensor, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    """A host copy on the device again, after `wait_copy`."""
    copy = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)  # the computing stream's memory
    with _aside(device):
        copy.copy_(host, non_blocking=True)
    return copy


@reload.register_fake
def _(host: Tensor, device: torch.device, after: Sequence[Tensor]) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


def _wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    device = source.device if source.is_cuda else copy.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
    return copy


# Its result is its argument, which `custom_op` does not allow. One kernel for all devices: the two are on different ones.
_library = torch.library.Library("asp", "FRAGMENT")
_library.define("wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)")
_library.impl("wait_copy", _wait_copy, "CompositeExplicitAutograd")
torch.library.register_fake("asp::wait_copy", lambda copy, source: copy, lib=_library)
wait_copy = torch.ops.asp.wait_copy
