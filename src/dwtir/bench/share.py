"""How much of a network's time its depthwise convolutions take."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..nn.chain import is_depthwise

_DEPTHWISE, _ALL = "depthwise convolutions", "all layers"
_CALLS = 5


def depthwise_share(model: Any, call: Callable[[], object]) -> float:
    """Profile calls of a model that has run before: the part of the time in depthwise convolutions.

    It is from 0 to 1, of the CPU's time, or of that in kernels on a GPU.
    """
    cuda = next(model.parameters()).is_cuda
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU]
    ranges: list[Any] = []

    def enter(*_: Any) -> None:
        ranges.append(torch.profiler.record_function(_DEPTHWISE))
        ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for conv in filter(is_depthwise, model.modules()):
            hooks.enter_context(conv.register_forward_pre_hook(enter))
            hooks.enter_context(conv.register_forward_hook(leave))
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(_CALLS):
                with torch.profiler.record_function(_ALL):
                    call()
            if cuda:
                torch.cuda.synchronize()
    host = torch.autograd.DeviceType.CPU  # a GPU's events repeat the names
    spent = {
        name: sum(
            event.device_time_total if cuda else event.cpu_time_total
            for event in profile.events()
            if event.name == name and event.device_type == host
        )
        for name in (_DEPTHWISE, _ALL)
    }
    return float(spent[_DEPTHWISE] / spent[_ALL])
