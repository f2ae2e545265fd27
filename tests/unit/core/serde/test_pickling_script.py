"""Compiled modules travel with their code and parameters."""

from __future__ import annotations

import torch

from asyncrpc.core.serde import Codec, FunctionTable, Policy


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def test_compiled_module_arrives_as_a_script_module() -> None:
    codec = Codec(FunctionTable(Policy.TRUSTED))
    encoded = codec.encode({"module": torch.jit.script(Scaled()), "rows": 3})
    buffers = [memoryview(bytearray(view)) for view in encoded.buffers]
    got = codec.decode(encoded.control, buffers)["module"]
    assert isinstance(got, torch.jit.ScriptModule)
    assert got(torch.ones(2)).tolist() == [2.0, 3.0]
    assert [parameter.requires_grad for parameter in got.parameters()] == [True]
