"""Memory of the host that states are copied into, kept from one checkpoint to the next."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64


class HostMemory:
    """One block of host memory that is handed out in pieces.

    It is allocated once and used again by every checkpoint, since touching and pinning fresh memory takes longer than the copy
    itself. For copies from a GPU it is pinned in place: torch's own allocator of pinned memory rounds up to a power of two,
    which wastes up to half.
    """

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._pinned = False
        self._used_bytes = 0

    def start(self, tensors: list[Tensor]) -> None:
        """Make room for copies of these tensors; what was handed out before is given up."""
        needed = sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors)
        pinned = any(tensor.is_cuda for tensor in tensors)
        self._used_bytes = 0
        if self._block is not None and self._block.numel() >= needed and self._pinned == pinned:
            return
        self.release()
        self._block = torch.empty(needed, dtype=torch.uint8)
        if pinned and needed:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), needed, 0))
            self._pinned = True

    def copy(self, source: Tensor) -> Tensor:
        """A copy in this memory, of the same shape and type. From a GPU it is complete only when the stream is."""
        assert self._block is not None, "start() makes the room"
        size = source.numel() * source.element_size()
        piece = self._block[self._used_bytes : self._used_bytes + size]
        self._used_bytes += _padded(size)
        target = piece.view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        return target

    def release(self) -> None:
        """Give the memory back; copies must not be used afterwards."""
        if self._block is not None and self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr()))
        self._block, self._pinned = None, False


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
