"""Calls on streams of CUDA and in its graphs."""

import torch


def captured(call):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def on_another_stream(call, data):
    """Call where the data come late: it must wait for that stream's work and for no other's."""
    late = torch.zeros_like(data)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(data)
        result = call(late)
    assert torch.cuda.current_stream().query(), "work went to the default stream"
    stream.synchronize()
    return result
