"""Every name of torch's RPC modules, private ones too, is the facade's or has a reason.

torch's modules are walked, so that a later version's new name cannot be forgotten.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Final

import pytest
import torch.distributed.rpc

from asyncrpc.compat import installing

RPC: Final = "torch.distributed.rpc"
PROFILER: Final = "a profiler of all threads that serve; asyncrpc's callers gather"
RANGES: Final = "makes the ranges of calls: asyncrpc.compat.rpc.profiling does"
TYPES: Final = "for type checkers"
COUNTER: Final = "torch's count of starts; ours is in asyncrpc.compat.rpc.starting"
MAPS: Final = "a part of torch's check of device maps: asyncrpc.compat.rpc.starting"
ENUM: Final = "a part of torch's enum of backends"
STEP: Final = "a part of torch's optimizer: asyncrpc.optim does the step"
MODULE: Final = "a part of torch's remote module: asyncrpc.compat.nn sends its own"
# By name, wherever torch has it.
LEFT_OUT: Final = {
    "GenericWithOneTypeVar": TYPES,
    "TYPE_CHECKING": TYPES,
    "_disable_server_process_global_profiler": PROFILER,
    "_enable_server_process_global_profiler": PROFILER,
    "_server_process_global_profile": PROFILER,
    "server_process_global_profiler": PROFILER,
    "_enable_rpc_profiler": RANGES,
    "_init_counter": COUNTER,
    "_init_counter_lock": COUNTER,
    "_backend_type_doc": ENUM,
    "_backend_type_repr": ENUM,
    "_create_device_list": MAPS,
    "_create_reverse_mapping": MAPS,
    "_get_device_infos": MAPS,
    "_init_process_group": "torch's former backend",
    "_set_devices_and_reverse_device_map": MAPS,
    "_tensorpipe_exchange_and_check_all_device_maps": MAPS,
    "_tensorpipe_validate_devices": MAPS,
    "_validate_device_maps": MAPS,
    "_LocalOptimizer": STEP,
    "_ScriptLocalOptimizer": STEP,
    "_ScriptLocalOptimizerInterface": STEP,
    "_local_optimizer_step": STEP,
    "_new_local_optimizer": STEP,
    "_new_script_local_optimizer": STEP,
    "_wait_for_all": STEP,
    "functional_optim_map": "torch.distributed.optim.utils has it",
    "_SerializedRemoteModule": MODULE,
    "_create_module_with_interface": MODULE,
    "_instantiate_template": MODULE,
    "_raise_not_supported": MODULE,
    "_recursive_script_module_receiver": MODULE,
    "_recursive_script_module_reducer": MODULE,
    "_remote_module_receiver": MODULE,
    "_remote_module_reducer": MODULE,
}
# Modules that have no place in the facade.
WITHOUT: Final = {f"{RPC}.server_process_global_profiler": PROFILER}


def torchs_modules() -> dict[str, ModuleType]:
    package = torch.distributed.rpc
    below = (
        f"{RPC}.{module_info.name}"
        for module_info in pkgutil.iter_modules(package.__path__)
    )
    names = [
        RPC,
        *below,
        "torch.distributed.autograd",
        "torch.distributed.optim.optimizer",
        "torch.distributed.nn.api.remote_module",
        "torch._C._distributed_rpc",
        "torch._C._distributed_autograd",
    ]
    names.remove(f"{RPC}._testing")  # importing it registers a backend
    # (`torch._C` is no package: its modules are there, and cannot be imported.)
    return {
        name: sys.modules.get(name) or importlib.import_module(name) for name in names
    }


MODULES: Final = torchs_modules()
HOMES: Final = installing._homes()  # noqa: SLF001


@pytest.mark.parametrize("module", sorted(MODULES.keys() - WITHOUT.keys()))
def test_every_name_of_torch_is_substituted_or_has_a_reason(module: str) -> None:
    substitute = installing.Substitute(module, HOMES[module], MODULES[module])
    missing = {
        name
        for name in vars(MODULES[module])
        if not (name.startswith("__") or hasattr(substitute, name))
    }
    assert not missing - LEFT_OUT.keys()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - WITHOUT.keys()))
def test_substitute_hands_on_no_rpc_function_or_class_of_torch(module: str) -> None:
    """But records of options, and switches of torch's own profiler and compiler."""
    substitute = installing.Substitute(module, HOMES[module], MODULES[module])
    theirs = {
        name
        for name, value in vars(MODULES[module]).items()
        if callable(value)
        and installing._is_theirs(value)  # noqa: SLF001
        and getattr(substitute, name, None) is value
    }
    assert theirs <= {
        *("RemoteProfilerManager", "RpcBackendOptions", "TensorPipeRpcBackendOptions"),
        *("WorkerInfo", "_TensorPipeRpcBackendOptionsBase", "_disable_jit_rref_pickle"),
        *("_enable_jit_rref_pickle", "_set_profiler_node_id", "_to_device"),
        *("_to_device_list", "_to_device_map"),
    }


def test_left_out_names_exist_in_torch_and_not_in_the_facade() -> None:
    theirs = {name for module in MODULES.values() for name in vars(module)}
    ours = {name for homes in HOMES.values() for home in homes for name in dir(home)}
    assert not LEFT_OUT.keys() - theirs
    assert LEFT_OUT.keys() & ours <= {"TYPE_CHECKING"}
