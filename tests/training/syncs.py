"""What makes a host wait for its device, seen without a device."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result the host needs before it can go on: a number, or a size that depends on
# values.
READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
}


class Syncs(TorchDispatchMode):
    """
    Collects every read of a tensor's values by the host.

    :ivar found: for each the operator and the lines of Python behind it.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in READS or masks:
            stack = traceback.extract_stack()[:-1]
            own = [f"{s.filename}:{s.lineno}" for s in stack if "/torch/" not in s.filename]
            self.found.append(f"{name} from {' <- '.join(own[:-4:-1])}")
        return func(*args, **(kwargs or {}))
