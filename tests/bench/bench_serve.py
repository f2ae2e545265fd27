"""Where does asyncrpc stand among Ray Serve, LitServe, BentoML and plain FastAPI?

    $ make bench-serve                # in .venv-serve, which has all of them
    $ make bench-serve UPDATE=1       # and into docs/explanation/serving-performance.md
    $ make bench-serve QUICK=1        # one short round

All serve the same models (`serving_models`) as their documentation says, see
`sides/serve_*`, and answer the same client (`sides/serve_client`), which has a process
of its own.  Each round starts every side afresh, and they take turns in who is first.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from tests.bench import machine, pages
from tests.bench import serving_models as m
from tests.bench.harness import Figure, Row, aligned, short, times_as_good
from tests.bench.processes import say
from tests.ports import free_port

SIDES: Final = ("asyncrpc", "ray", "litserve", "bentoml", "fastapi")
TITLES: Final = dict(
    zip(SIDES, ("asyncrpc", "Ray Serve", "LitServe", "BentoML", "FastAPI"), strict=True)
)
PACKAGES: Final = ("ray", "litserve", "bentoml", "fastapi", "uvicorn", "gunicorn")
ROUNDS: Final = 3
SECONDS: Final = 5.0
LIGHT_RATE: Final = 50.0  # requests a second: nothing waits for another
LIMIT_P99_MS: Final = 50.0
CONNECTIONS: Final = 32
STREAMS: Final = 8
WEB_WORKERS: Final = 4
BALLAST_MIB: Final = 200
# The sides whose web workers may be started by any ASGI server.
ASGI_SIDES: Final = ("asyncrpc", "fastapi")
LEAVES: Final = 5  # clients that go away, in each round
NEVER_MS: Final = 10_000.0  # a model that works on for so long is not watched further
START_S: Final = 120.0
# Memory is as it stays if so many looks in a row, each after a second of requests, find
# it within a percent.
SETTLED_LOOKS: Final = 5
SETTLED_LOOKS_MAX: Final = 60
MARK: Final = "BENCH_SERVE_MARK"  # in the environment of all processes of a side
ROOT: Final = Path(__file__).parents[2]

PREDICT: Final = json.dumps({"row": [0.5] * m.FEATURES})
GENERATE: Final = json.dumps({"tokens": m.TOKENS})
GENERATE_LONG: Final = json.dumps({"tokens": 100_000})

RATE_AT_P99: Final = Row(
    f"requests/s, open loop, p99 <= {LIMIT_P99_MS:g} ms", "1/s", higher_is_better=True
)
RATE_CLOSED: Final = Row(
    f"requests/s, {CONNECTIONS} connections", "1/s", higher_is_better=True
)
P50_CLOSED: Final = Row("  their p50", "ms")
P99_CLOSED: Final = Row("  their p99", "ms")
P999_CLOSED: Final = Row("  their p99.9", "ms")
P50_ALONE: Final = Row("one request at a time: p50", "ms")
ADDED: Final = Row("  of it beside the model", "ms")
P50_LIGHT: Final = Row(f"{LIGHT_RATE:g} requests/s, open loop: p50", "ms")
P99_LIGHT: Final = Row("  their p99", "ms ")
P999_LIGHT: Final = Row("  their p99.9", "ms ")
FREED: Final = Row("client leaves a stream: model free after", "ms")
TOKENS_RATE: Final = Row(
    f"tokens/s, {STREAMS} streams (SSE)", "1/s", higher_is_better=True
)
FIRST_P50: Final = Row("  time to first token: p50", "ms")
FIRST_P99: Final = Row("  time to first token: p99", "ms")
MEMORY: Final = Row(f"PSS, {WEB_WORKERS} web workers, {BALLAST_MIB} MiB model", "MiB")
PRELOADED: Final = Row("  under gunicorn --preload", "MiB")
ROWS: Final = (
    *(RATE_AT_P99, RATE_CLOSED, P50_CLOSED, P99_CLOSED, P999_CLOSED),
    *(P50_ALONE, ADDED, P50_LIGHT, P99_LIGHT, P999_LIGHT),
    *(FREED, TOKENS_RATE, FIRST_P50, FIRST_P99, MEMORY, PRELOADED),
)

Found = dict[Row, float]


class Effort(NamedTuple):
    rounds: int  # starts of each side
    seconds: float  # of each load
    steps: int  # of the search for the highest rate


FULL: Final = Effort(ROUNDS, SECONDS, 6)
QUICK: Final = Effort(1, 2.0, 4)


# --- a side that runs ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningSide:
    """A side that has been started."""

    side: str  # which
    port: int  # where it listens
    mark: str  # in the environment of all of its processes
    notes: Path  # the file in which its model notes what it does

    def load(
        self, mode: str, path: str, body: str, /, **options: float
    ) -> dict[str, Any]:
        """Let the client do something; return what it found."""
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "tests.bench.sides.serve_client", mode]
        command += [f"--port={self.port}", f"--path={path}", f"--body={body}", *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def pss_mib(self) -> float:
        """Return the memory of all of its processes, what they share counted once."""
        return sum(_pss_kib(pid) for pid in pids_with(self.mark)) / 1024

    def settled_pss_mib(self) -> float:
        """Return its memory once all web workers are up and have had requests."""
        found_mib = [0.0] * SETTLED_LOOKS
        for _ in range(SETTLED_LOOKS_MAX):
            self.load("closed", "/predict", PREDICT, connections=32, seconds=1.0)
            found_mib = [*found_mib[1:], self.pss_mib()]
            if max(found_mib) < 1.01 * min(found_mib):
                break
        return found_mib[-1]

    def processes(self) -> int:
        return len(list(pids_with(self.mark)))

    def work_ends(self, left_s: float) -> float:
        """Return when the model last worked, in milliseconds after `left_s`."""
        end_s = left_s + NEVER_MS / 1000
        while time.monotonic() < end_s:
            time.sleep(0.1)
            word, at_s = self._note()
            is_over = word == "ended" or time.monotonic() - at_s > 1.0
            if is_over and at_s:
                return max(0.0, 1000 * (at_s - left_s))
        return NEVER_MS

    def _note(self) -> tuple[str, float]:
        try:
            word, at = self.notes.read_text(encoding="ascii").split()
        except (OSError, ValueError):  # it is being written
            return "", 0.0
        return word, float(at)


@contextmanager
def running(
    side: str, *, web_workers: int = 1, ballast_mib: int = 0, server: str = ""
) -> Iterator[Any]:
    """Start a side, and end all of its processes afterwards.

    Args:
        server: "gunicorn": that, instead of what the side starts by itself.
    """
    mark, port = uuid.uuid4().hex, free_port()
    with tempfile.TemporaryDirectory(prefix="bs-") as folder:
        notes = Path(folder) / "note"
        environ = os.environ | {
            MARK: mark,
            m.NOTES: str(notes),
            m.BALLAST: str(ballast_mib),
            "ASYNCRPC_RUN_DIR": str(Path(folder) / "runs"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        log = Path(folder) / "log"
        with log.open("wb") as output:
            module = f"tests.bench.sides.serve_{side}"
            options = ["--port", str(port), "--web-workers", str(web_workers)]
            if server == "gunicorn":
                options = ["-k", "uvicorn_worker.UvicornWorker", "--preload"]
                options += ["-w", str(web_workers), "-b", f"127.0.0.1:{port}"]
                options.append(f"{module}:app")
                module = "gunicorn"
            process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                stdout=output,
                stderr=output,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            _await_health(port, process, log)
            yield RunningSide(side, port, mark, notes)
        finally:
            _end(process, mark)


def _await_health(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            break
        with suppress(OSError):
            url = f"http://127.0.0.1:{port}/healthz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise RuntimeError(f"it did not start: {log.read_text(errors='replace')[-400:]}")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the processes of a side: in order, then what is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    process.kill()
    process.wait()
    for _ in range(3):  # processes of processes
        for pid in list(pids_with(mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def pids_with(mark: str) -> Iterator[int]:
    """Yield the processes that have a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _pss_kib(pid: int) -> int:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        for line in text.splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


# --- what is measured ----------------------------------------------------------------


def answered(
    row: Row, side: RunningSide, *load: str, **options: float
) -> dict[str, Any]:
    """Return what the load of a row found, if every request of it was answered."""
    report = side.load(*load, **options)
    if report["failed"]:
        raise RuntimeError(f"{row.name}: {report['failed']} requests failed")
    return report


def measure_alone(side: RunningSide, seconds: float, model_ms: float) -> Found:
    """Return the figures of one request at a time."""
    side.load("closed", "/predict", PREDICT, connections=CONNECTIONS, seconds=2.0)
    load = ("closed", "/predict", PREDICT)
    report = answered(P50_ALONE, side, *load, connections=1, seconds=seconds)
    return {P50_ALONE: report["p50_ms"], ADDED: report["p50_ms"] - model_ms}


def measure_light(side: RunningSide, seconds: float) -> Found:
    """Return the figures of so few requests that nothing waits for another."""
    load = ("open", "/predict", PREDICT)
    report = answered(P50_LIGHT, side, *load, rate=LIGHT_RATE, seconds=seconds)
    rows = {P50_LIGHT: "p50_ms", P99_LIGHT: "p99_ms", P999_LIGHT: "p999_ms"}
    return {row: report[name] for row, name in rows.items()}


def measure_rates(side: RunningSide, effort: Effort) -> Found:
    """Return the figures of as many requests as are answered."""
    load = ("closed", "/predict", PREDICT)
    times = {"connections": CONNECTIONS, "seconds": effort.seconds}
    report = answered(RATE_CLOSED, side, *load, **times)
    return {
        RATE_CLOSED: report["rate"],
        P50_CLOSED: report["p50_ms"],
        P99_CLOSED: report["p99_ms"],
        P999_CLOSED: report["p999_ms"],
        RATE_AT_P99: highest_rate(side, effort, report["rate"]),
    }


def highest_rate(side: RunningSide, effort: Effort, closed_rate: float) -> float:
    """Return the highest rate at which p99 is within the limit, by bisection."""
    low, high = 0.0, 1.2 * closed_rate
    for _ in range(effort.steps):
        rate = (low + high) / 2
        report = side.load(
            "open", "/predict", PREDICT, rate=rate, seconds=effort.seconds * 0.6
        )
        is_within = not report["failed"] and report["p99_ms"] <= LIMIT_P99_MS
        low, high = (rate, high) if is_within else (low, rate)
    return low


def measure_streams(side: RunningSide, effort: Effort) -> Found:
    """Return the figures of streams of tokens."""
    load = ("closed", "/generate", GENERATE)
    side.load(*load, connections=STREAMS, seconds=0.5)
    report = side.load(*load, connections=STREAMS, seconds=2 * effort.seconds)
    if report["failed"] or not report["events_rate"]:
        raise RuntimeError(f"{report['failed']} streams failed")
    return {
        TOKENS_RATE: report["events_rate"],
        FIRST_P50: report["first_p50_ms"],
        FIRST_P99: report["first_p99_ms"],
    }


def measure_leaving(side: RunningSide) -> Found:
    """Return how long a model works on for a client that has gone."""
    times_ms = []
    for _ in range(LEAVES):
        report = side.load("leave", "/generate", GENERATE_LONG, events=5)
        times_ms.append(side.work_ends(report["left_s"]))
        if times_ms[-1] >= NEVER_MS:
            break
    return {FREED: sorted(times_ms)[len(times_ms) // 2]}


def measure_memory(side: str, row: Row, server: str = "") -> Found:
    """Return the memory of a side with several web workers, after some requests."""
    with running(
        side, web_workers=WEB_WORKERS, ballast_mib=BALLAST_MIB, server=server
    ) as running_side:
        found_mib = running_side.settled_pss_mib()
        say(f"  {side:>8}  {running_side.processes()} processes, {found_mib:.0f} MiB")
        return {row: found_mib}


def model_alone_ms() -> float:
    """Return the median time of one row in the model itself."""
    model, row = m.Classifier(), torch.ones(1, m.FEATURES)
    times_s = []
    for _ in range(300):
        begin_s = time.perf_counter()
        model(row)
        times_s.append(time.perf_counter() - begin_s)
    return 1000 * sorted(times_s)[len(times_s) // 2]


class ServeComparison:
    """The figures of all rounds so far."""

    def __init__(self, sides: Sequence[str], effort: Effort) -> None:
        self._sides = sides
        self._effort = effort
        # By side, one for each round.
        self.rounds: dict[str, list[Found]] = {side: [] for side in sides}
        # By side, why something is missing.
        self.failures: dict[str, list[str]] = {side: [] for side in sides}

    def run(self) -> None:
        """Measure."""
        rounds, sides = self._effort.rounds, list(self._sides)
        for number in range(rounds):
            first = number % len(sides)
            for side in sides[first:] + sides[:first]:
                say(f"round {number + 1} of {rounds}: {TITLES[side]}")
                self.rounds[side].append(self._measure(side))

    def _measure(self, side: str) -> Found:
        round_figures: Found = {}
        model_ms = model_alone_ms()
        try:
            with running(side) as running_side:
                for part in (
                    lambda: measure_alone(running_side, self._effort.seconds, model_ms),
                    lambda: measure_light(running_side, self._effort.seconds),
                    lambda: measure_rates(running_side, self._effort),
                    lambda: measure_streams(running_side, self._effort),
                    lambda: measure_leaving(running_side),
                ):
                    self._take(side, round_figures, part)
        except RuntimeError as error:
            self.failures[side].append(str(error))
        self._take(side, round_figures, lambda: measure_memory(side, MEMORY))
        if side in ASGI_SIDES:
            self._take(
                side, round_figures, lambda: measure_memory(side, PRELOADED, "gunicorn")
            )
        return round_figures

    def _take(self, side: str, round_figures: Found, part: Any) -> None:
        try:
            figures = part()
        except RuntimeError as error:
            say(f"  {side:>8}  failed: {error}")
            self.failures[side].append(str(error))
            return
        round_figures |= figures
        for row, value in figures.items():
            say(f"  {side:>8}  {row.name.strip():<42} {short(value)} {row.unit}")

    def figure(self, side: str, row: Row) -> Figure | None:
        """Return what the rounds of a side gave for a row."""
        values = [figures[row] for figures in self.rounds[side] if row in figures]
        values = [value for value in values if not math.isnan(value)]
        return Figure(tuple(values)) if values else None


# --- the table -----------------------------------------------------------------------


def table(comparison: ServeComparison, sides: Sequence[str]) -> str:
    """Return the rows: text to the left, numbers to the right."""
    lines = [["", "unit", *(TITLES[side] for side in sides), "ratio"]]
    for row in ROWS:
        figures = [comparison.figure(side, row) for side in sides]
        cells = [
            f"> {short(NEVER_MS)}"
            if row is FREED and _is_never(figure)
            else str(figure or "-")
            for figure in figures
        ]
        ours = figures[0] if sides[0] == "asyncrpc" else None
        ratio = times_as_good(row, ours, figures[1:])
        ratio_text = "-" if ratio is None else f"{ratio:.2f}"
        lines.append([row.name, row.unit, *cells, ratio_text])
    return aligned(lines)


def _is_never(figure: Figure | None) -> bool:
    return figure is not None and figure.median >= NEVER_MS


def about(effort: Effort) -> str:
    """Return what the figures are, and which versions they are of."""
    return (
        f"medians (least-most) over {effort.rounds} rounds, {effort.seconds:g} s a "
        "load; ratio over 1: asyncrpc\ndoes better than the best of the others.  "
        f"{machine.versions(PACKAGES)}"
    )


def missing() -> list[str]:
    return [
        package for package in PACKAGES if importlib.util.find_spec(package) is None
    ]


def failure_text(failures: Mapping[str, Sequence[str]]) -> str:
    """Return why something is missing, a line for each failure."""
    lines = [
        f"failed: {TITLES[side]}: {reason}"
        for side, reasons in failures.items()
        for reason in reasons
    ]
    return "\n".join(["", *lines])


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    options = parser.parse_args()
    if missing():
        parser.error(f"{', '.join(missing())} are not installed: run make bench-serve")
    effort = QUICK if options.quick else FULL
    begun_s, load = time.monotonic(), machine.load()
    comparison = ServeComparison(options.sides, effort)
    comparison.run()
    text = f"{table(comparison, options.sides)}\n\n{about(effort)}"
    text += failure_text(comparison.failures)
    print(f"{machine.describe()}, load {load:g} before the run\n\n{text}")
    if options.update_docs:
        pages.renew("serve", pages.as_block(text), pages.SERVING)
    say(f"{time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
