"""What does it take to bring a tensor through a queue to another process?

`asyncrpc.multiprocessing.Queue` beside torch.multiprocessing.Queue, each between this
process and one other, in starts that alternate.  A row is a kind of item:

- *there and back*: the item is put, and the other process answers 0 when it has it;
- *stream*: items are put one after the other, and the last one's answer ends it.

Each tensor is a new one, as a training loop makes them; making it is not counted.  The
dict has two entries.

    $ make bench ONLY=queue
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.multiprocessing

from asyncrpc.core.loop.clock import now_s
from asyncrpc.multiprocessing import Queue
from tests.bench import pages

STARTS: Final = 4  # of each side
WARM_UP: Final = 5
ITEMS: Final[dict[str, tuple[Callable[[], Any], int]]] = {
    "dict": (lambda: {"epoch": 3, "loss": 0.25}, 500),
    "tensor of 1 KiB": (lambda: torch.ones(256), 300),
    "tensor of 1 MiB": (lambda: torch.ones(1 << 18), 100),
    "tensor of 16 MiB": (lambda: torch.ones(1 << 22), 20),
}
SIDES: Final = ("asyncrpc", "torch")


def answer(inbox: Any, outbox: Any) -> None:
    """Be the other process."""
    torch.set_num_threads(1)
    while True:
        item = inbox.get()
        if item is None:
            return
        del item
        outbox.put(0)


def measure(side: str) -> dict[tuple[str, str], float]:
    """Return the median microseconds of an item, by kind and way, in one start."""
    context = torch.multiprocessing.get_context("spawn")
    inbox: Any
    outbox: Any
    if side == "torch":
        inbox, outbox = context.Queue(), context.Queue()
    else:
        inbox, outbox = Queue[Any](), Queue[Any]()
    process = context.Process(target=answer, args=(inbox, outbox))
    process.start()
    rates = {}
    for kind, (make, count) in ITEMS.items():
        there_and_back(make, WARM_UP, inbox, outbox)
        rates[kind, "there and back"] = there_and_back(make, count, inbox, outbox)
        rates[kind, "stream"] = stream(make, count, inbox, outbox)
    inbox.put(None)
    process.join()
    process.close()
    inbox.close()
    outbox.close()
    return rates


def there_and_back(
    make: Callable[[], Any], count: int, inbox: Any, outbox: Any
) -> float:
    """Return the median microseconds from a put to its answer."""
    took_s = []
    for _ in range(count):
        item = make()
        begun_s = now_s()
        inbox.put(item)
        outbox.get()
        took_s.append(now_s() - begun_s)
    return statistics.median(took_s) * 1e6


def stream(make: Callable[[], Any], count: int, inbox: Any, outbox: Any) -> float:
    """Return the mean microseconds an item takes if the next does not wait for it."""
    items = [make() for _ in range(count)]
    begun_s = now_s()
    for item in items:
        inbox.put(item)
    for _ in items:
        outbox.get()
    return (now_s() - begun_s) / count * 1e6


def table(results: dict[str, list[dict[tuple[str, str], float]]]) -> str:
    """Return what is printed.

    Args:
        found: what `measure` has returned, by side and start.
    """
    heads = ("us an item", "way", *SIDES, "ratio")
    lines = [f"{heads[0]:18}{heads[1]:16}{heads[2]:>26}{heads[3]:>26}{heads[4]:>8}"]
    for kind in ITEMS:
        for way in ("there and back", "stream"):
            cells, medians = [], []
            for side in SIDES:
                values = sorted(rates[kind, way] for rates in results[side])
                medians.append(statistics.median(values))
                spread = f"({values[0]:,.0f}-{values[-1]:,.0f})"
                cells.append(f"{medians[-1]:,.0f} {spread}")
            ratio = medians[1] / medians[0]
            lines.append(f"{kind:18}{way:16}{cells[0]:>26}{cells[1]:>26}{ratio:>8.2f}")
    about = (
        f"medians of {STARTS} starts (least-most); ratio over 1: asyncrpc does better"
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = pages.parser(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[dict[tuple[str, str], float]]] = {
        side: [] for side in SIDES
    }
    for start in range(STARTS):
        for side in SIDES if start % 2 == 0 else SIDES[::-1]:
            results[side].append(measure(side))
    text = table(results)
    pages.show("queue", text, options)


if __name__ == "__main__":
    main()
