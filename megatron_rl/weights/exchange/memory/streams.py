"""In which order a device does what several threads ask of it. Used by trainer ranks and engines.

A device does what stands in one stream in its order, and streams beside each other. All threads
begin in the same stream: what a thread of a weight sync copies there would wait for all that the
training has queued before. Needs torch alone.
"""

import threading

import torch


class SideStreams:
    """Streams for threads that work beside the one that makes this.

    The same ones each time: torch keeps what was freed in a stream for that stream.
    """

    def __init__(self, device: torch.device) -> None:
        """device: of the streams; threads on the CPU need none."""
        self._device = device
        self._streams: list[torch.Stream] = []
        self._taken = 0
        self._taking = threading.Lock()
        self._begin: torch.Event | None = None

    def begin(self) -> None:
        """What the calling thread has queued on the device comes before all that follows."""
        if self._device.type != "cpu":
            self._begin = torch.accelerator.current_stream(self._device).record_event()
            self._taken = 0

    def enter(self) -> None:
        """Called in a thread, once after `begin`: a stream of its own, from now on."""
        if self._begin is None:
            return
        torch.accelerator.set_device_index(self._device.index)
        with self._taking:
            if self._taken == len(self._streams):
                self._streams.append(torch.Stream(self._device))
            stream = self._streams[self._taken]
            self._taken += 1
        stream.wait_event(self._begin)
        torch.accelerator.set_stream(stream)


def synchronize(device: torch.device) -> None:
    """Wait until what the calling thread has started on the device is done."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
