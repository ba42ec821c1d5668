"""In which order a device does what several threads ask of it. Used by trainer ranks and engines.

A device does what stands in one stream in its order, and streams beside each other. All threads
begin in the same stream: what a thread of a publish has copied there would wait for all that the
training has queued before. Needs torch alone.
"""

import torch


class SideStreams:
    """Streams for threads that work beside the one that makes this."""

    def __init__(self, device: torch.device) -> None:
        """What the calling thread has queued on the device comes before all of theirs."""
        self._device = device
        self._begin: torch.Event | None = None
        if device.type != "cpu":
            self._begin = torch.accelerator.current_stream(device).record_event()

    def enter(self) -> None:
        """Called in a thread: a stream of its own on this device, from now on."""
        if self._begin is None:
            return
        torch.accelerator.set_device_index(self._device.index)
        stream = torch.Stream(self._device)
        stream.wait_event(self._begin)
        torch.accelerator.set_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until what the calling thread has started on the device is done."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
