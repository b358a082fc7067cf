"""CUDA streams without CUDA: every access to memory is noted with its stream, and checked to be in order.

`Streams` stands in the place of `torch.cuda`. Nothing runs late here. What a stream, or the host, has seen of the
others is a vector of counts; an access that has not seen an earlier one to the same memory, where one of both writes,
is a race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HOST = "host"
Seen = Counter[str]  # how much of each queue has been seen


@dataclass(eq=False)
class FakeStream:
    """A queue of a device."""

    streams: Streams
    name: str

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.join(self.name, self.streams.seen[other.name])

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.streams, self.streams.seen[self.name].copy())


@dataclass(eq=False)
class FakeEvent:
    """What was in a queue when it was recorded."""

    streams: Streams
    seen: Seen

    def synchronize(self) -> None:
        self.streams.join(HOST, self.seen)


@dataclass
class Accesses:
    """Who used one piece of memory last: the count of its queue by then."""

    write: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)


class Streams(TorchDispatchMode):
    """The device, and the watcher of all that torch does while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Seen] = {HOST: Counter()}
        self.races: list[str] = []
        self.used: Counter[str] = Counter()  # operations of each queue
        self._memory: dict[int, Accesses] = {}
        self._alive: list[Tensor] = []  # so that no memory is another tensor's later
        self._current = self.Stream("compute")

    # What torch.cuda has

    def Stream(self, name: str = "") -> FakeStream:  # noqa: N802
        stream = FakeStream(self, name or f"stream {len(self.seen)}")
        self.seen[stream.name] = Counter()
        return stream

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        for seen in list(self.seen.values()):
            self.join(HOST, seen)

    # The watcher

    def join(self, queue: str, seen: Seen) -> None:
        self.seen[queue] |= seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        infos = func._schema.arguments
        if not func.is_view:
            name = str(func)
            self._use(name, [t for t, info in _tensors(args, kwargs, infos) if not _writes(info)], is_write=False)
            self._use(name, [t for t, info in _tensors(args, kwargs, infos) if _writes(info)], is_write=True)
            self._use(name, [t for t in _flat(result) if isinstance(t, Tensor)], is_write=True)
        return result

    def read(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Note what a kernel reads that torch does not know of."""
        self._use(name, tensors, is_write=False)

    def _use(self, name: str, tensors: Sequence[Tensor], *, is_write: bool) -> None:
        queue = self._current.name
        seen = self.seen[queue]
        seen |= self.seen[HOST]  # it was asked to by the host
        self.seen[queue] = seen
        seen[queue] += 1
        self.used[queue] += 1
        for tensor in (tensor for tensor in tensors if tensor.numel()):
            self._alive.append(tensor)
            memory = self._memory.setdefault(tensor.untyped_storage().data_ptr(), Accesses())
            others = dict([memory.write] if memory.write else [])
            others |= memory.reads if is_write else {}
            for other, count in others.items():
                if seen[other] < count:
                    self.races.append(f"{name} on {queue}, beside {other}: {tuple(tensor.shape)} {tensor.dtype}")
            if is_write:
                memory.write, memory.reads = (queue, seen[queue]), {}
            else:
                memory.reads[queue] = seen[queue]


def _writes(info: Any) -> bool:
    return info is not None and info.alias_info is not None and info.alias_info.is_write


def _tensors(args: Sequence[Any], kwargs: dict[str, Any], infos: Sequence[Any]) -> Iterator[tuple[Tensor, Any]]:
    by_name = {info.name: info for info in infos}
    given = [*zip(args, infos, strict=False), *((value, by_name.get(name)) for name, value in kwargs.items())]
    for value, info in given:
        for tensor in _flat(value):
            if isinstance(tensor, Tensor):
                yield tensor, info


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value
