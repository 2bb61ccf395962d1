"""Devices that torch can put a tensor on."""

from __future__ import annotations

import torch


def usable_device(device: torch.device | str) -> torch.device:
    """``device`` as torch's, once torch has used it.

    Raises:
        TypeError: it is neither a torch.device nor a name.
        ValueError: the name is none, or torch finds no such device on this machine.
    """
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"device must be a torch.device or its name, 'cuda' or 'cpu' say, got {type(device).__name__}")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without that kind of device
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device must be one that torch can use on this machine, got {str(device)!r} ({reason}): `kda doctor` says "
            "what is missing; 'cpu' needs TRITON_INTERPRET=1 to run the kernels"
        ) from None
    return found
