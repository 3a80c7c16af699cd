"""The fault matrix: what a job sees when a process dies, stops or fails, when its store dies, when a link is cut.

    python -m tests.faults                        # every row, then the table of docs/faults.md
    python -m tests.faults launch SIGSTOP         # the rows whose name has all of these words

A row is a fault, a phase of the job, a moment before, in or after the phase, and a launcher. The ranks are real
processes (tests/fault_program.py). For each row it is measured when and with what each surviving rank ended, and
looked for what is left of it: processes, listening ports, files in the temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.common import lives, waited
from tests.fault_program import MOMENTS, PHASES, START, program

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/faults.md"

OF_A_RANK = ("SIGKILL", "SIGTERM", "SIGSTOP", "exit", "exception")
OF_THE_STORE = ("store killed", "store stopped")
CUT = "cut link"
FAULTS = (*OF_A_RANK, *OF_THE_STORE, CUT)
LAUNCHERS = ("launch", "torchrun")

TORCHS = ("torchinductor", "torchelastic")
"""Folders of torch in the temporary folder: its compiler's cache, made when that is imported, and the logs of torchrun."""

NO_NAMESPACES = 77


@dataclass(frozen=True)
class Row:
    """One fault that is injected."""

    launcher: str
    fault: str
    phase: str
    moment: str

    def __str__(self) -> str:
        return f"{self.launcher}: {self.fault} {self.moment} {self.phase}"

    @property
    def size(self) -> int:
        """How many ranks: for a cut link one on each of two hosts."""
        return 2 if self.fault == CUT else 3

    @property
    def victim(self) -> int:
        """The rank that injects the fault."""
        return (self.size - 1) // 2

    @property
    def survivors(self) -> list[int]:
        """The ranks that go on after it."""
        return [rank for rank in range(self.size) if rank != self.victim or self.fault not in OF_A_RANK]

    @property
    def may_finish(self) -> bool:
        """Whether what is still to be done needs nothing that the fault takes away."""
        at = PHASES.index(self.phase), MOMENTS.index(self.moment)
        needed = (1, 1) if self.fault in OF_THE_STORE else (3, 1)  # up to connecting; up to the end of the save
        return at > needed

    @property
    def names(self) -> str:
        """What an error of axes says: the rank that is gone and where it was, or that it is the store."""
        if self.fault in OF_A_RANK:
            return rf"rank {self.victim} (hasn't been seen|was last seen|waits|raised|can't take part)"
        return "store" if self.fault in OF_THE_STORE else r"store|rank [01] (hasn't been seen|was last seen|waits)"

    @property
    def launcher_names(self) -> str:
        """What the launcher says where it ends ranks: rank and cause."""
        if self.launcher == "launch":
            how = {"SIGSTOP": "hadn't finished", "exit": "of 3 exited with code 0", "exception": "of 3 failed first"}
            if self.fault == "store stopped" or (self.fault == "SIGSTOP" and self.may_finish):
                return ""  # nobody is ended
            if self.fault == "store killed":
                return "was lost: the process that started them died"
            of_a_rank = rf"rank {self.victim} {how.get(self.fault, f'of 3 was killed by {self.fault}')}"
            # Of a save torch tells all ranks itself which one raised what.
            return rf"{of_a_rank}|CheckpointException ranks:dict_keys\(\[{self.victim}\]\)"
        code = {"SIGKILL": "-9", "SIGTERM": "-15", "exception": "1"}.get(self.fault)
        # Of a rank that is stopped or ended well torchrun knows nothing: the error of another is its root cause.
        rank = r"\d" if code is None else str(self.victim)
        return rf"Root Cause[^=]* rank +: {rank} [^=]* exitcode +: {code or 1} "


# A launch is of one machine: it has no link to cut.
ROWS = [
    Row(launcher, fault, phase, moment)
    for launcher in LAUNCHERS
    for fault in FAULTS
    if (launcher, fault) != ("launch", CUT)
    for phase in PHASES
    for moment in MOMENTS
]


# ---------------------------------------------------------------------------- what happened

RANK_LIMIT = 15.0
"""Seconds that a surviving rank may take to end: `LIMIT`, five more for who hosts the store, and slack."""

TORCHRUNS_PATIENCE = {"SIGSTOP": 30.0, "cut link": 90.0}
"""Seconds that torchrun waits after SIGTERM for a rank that is stopped, and at its end for a store that is unreachable."""


@dataclass
class End:
    """How a rank ended, `seconds` after the fault: with an error, with none ("finished"), or ended by its launcher.

    `saving`: whether it was in torch's own `dcp.save`.
    """

    kind: str
    seconds: float
    text: str = ""
    cause: str = ""
    saving: bool = False

    @property
    def by(self) -> str:
        """Who ended it."""
        return {"finished": "done", "DesyncError": "axes", "ended": "launcher"}.get(self.kind, "torch")


@dataclass
class Outcome:
    """What was seen of one row. `ends`: of the ranks that the fault didn't hit. `said`: by the launcher, at its end."""

    row: Row
    ends: dict[int, End] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    skipped: str = ""

    def cell(self) -> str:
        """The row in the table: who ended the surviving ranks, and when."""
        if self.skipped:
            return "not run"
        last: dict[str, float] = {}
        for end in self.ends.values():
            last[end.by] = max(end.seconds, last.get(end.by, 0.0))
        words = {"launcher": self.row.launcher}
        return ", ".join("done" if by == "done" else f"{words.get(by, by)} {t:.1f} s" for by, t in sorted(last.items()))

    def wrong(self) -> list[str]:
        """What isn't as it is promised."""
        if self.skipped:
            return []
        row = self.row
        late = TORCHRUNS_PATIENCE.get(row.fault, 0.0) if row.launcher == "torchrun" else 0.0
        found = [f"left: {each}" for each in self.left]
        found += [f"rank {rank} didn't end" for rank in row.survivors if rank not in self.ends]
        if self.seconds > RANK_LIMIT + 10 + late:
            found.append(f"the job took {self.seconds:.0f} s to end")
        for rank, end in self.ends.items():
            if end.seconds > RANK_LIMIT:
                found.append(f"rank {rank} took {end.seconds:.0f} s to end")
            if end.by == "done" and not row.may_finish:
                found.append(f"rank {rank} finished, as if nothing had happened")
            if end.by == "axes" and not re.search(row.names, end.text):
                found.append(f"rank {rank} isn't told why: {end.text}")
            if end.by == "torch" and not end.saving:
                found.append(f"rank {rank} has an error that says little: {end.kind}: {end.text}")
        needed = [row.launcher_names] * (row.launcher == "launch" or "launcher" in {e.by for e in self.ends.values()})
        return found + [
            f"the launcher doesn't say why: {self.said}" for each in needed if not re.search(each, self.said)
        ]


# ---------------------------------------------------------------------------- one row


def processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())


def listening() -> dict[str, int]:
    """The ports that somebody listens on, by the socket."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    return found


class Watch:
    """Sees from outside when the ranks of a row end, and remembers what belongs to them."""

    def __init__(self, row: Row, folder: Path):
        self.row, self.folder = row, folder
        self.who: dict[int, dict[str, int]] = {}
        self.gone: dict[int, float] = {}
        self.sockets: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def fault_at(self) -> float | None:
        """When the fault happened."""
        return float((self.folder / "time").read_text()) if (self.folder / "time").exists() else None

    @property
    def all_gone(self) -> bool:
        """Whether no rank is left."""
        return len(self.gone) == self.row.size

    @property
    def all_ended(self) -> bool:
        """Whether every rank that the fault didn't hit has said how it ended."""
        return all((self.folder / f"ended{rank}").exists() for rank in self.row.survivors)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for rank in range(self.row.size):
                if rank not in self.who and (file := self.folder / f"who{rank}").exists():
                    self.who[rank] = json.loads(file.read_text())
                if rank in self.who and rank not in self.gone and not lives(self.who[rank]["pid"]):
                    self.gone[rank] = time.monotonic()
            if self.all_ended:
                self._let_go()
            if not self.sockets and self.fault_at is not None:
                ports = {who["port"] for who in self.who.values()}
                self.sockets = {socket for socket, port in listening().items() if port in ports}

    def _let_go(self) -> None:
        """Ends what launchers wait for though every rank has finished: a rank that is stopped, the other host."""
        if str(self.row).endswith("SIGSTOP after save"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.who[self.row.victim]["pid"], signal.SIGCONT)
        if (self.row.launcher, self.row.fault) == ("launch", "store stopped"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.who[self.row.victim]["group"], signal.SIGCONT)  # the agent of the launch
        if str(self.row).endswith("cut link after save"):
            (self.folder / "ended").touch()  # tests/hosts.sh ends both torchruns

    def ends(self) -> dict[int, End]:
        """How the ranks ended, but the one that the fault hit."""
        begin, found = self.fault_at or 0.0, {}
        for rank in range(self.row.size):
            if rank not in self.row.survivors:
                continue
            file = self.folder / f"ended{rank}"
            if file.exists():
                end = json.loads(file.read_text())
                found[rank] = End(
                    end["kind"] or "finished", end["time"] - begin, end["text"], end["cause"], end["saving"]
                )
            elif rank in self.gone:
                found[rank] = End("ended", self.gone[rank] - begin)
        return found

    def left(self) -> list[str]:
        """What is still there of the job."""
        pids = {who["pid"] for who in self.who.values()}
        groups = {who["group"] for who in self.who.values()}
        found = []
        for pid in filter(lives, processes()):
            with contextlib.suppress(OSError):  # it has ended
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if pid in pids or os.getpgid(pid) in groups or str(self.folder).encode() in environ:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"process {pid}, {command:.80}")
        # By the socket: another process may have been given the port since.
        found += [f"port {port}" for socket, port in listening().items() if socket in self.sockets]
        return found + [f"file {f.name}" for f in (self.folder / "tmp").iterdir() if not f.name.startswith(TORCHS)]


def run(row: Row) -> Outcome:
    """Injects the fault of a row."""
    with tempfile.TemporaryDirectory(prefix="axes-faults-") as name, Watch(row, Path(name)) as watch:
        folder = Path(name)
        (folder / "tmp").mkdir()
        outcome = Outcome(row)
        how = by_launch if row.launcher == "launch" else on_two_hosts if row.fault == CUT else by_torchrun
        outcome.said, outcome.skipped = how(row, folder, watch)
        if watch.fault_at is not None:
            outcome.seconds = time.monotonic() - watch.fault_at
            waited(lambda: watch.all_gone, RANK_LIMIT)
        outcome.ends = watch.ends()
        if not waited(lambda: not watch.left(), 5):
            outcome.left = watch.left()
            for pid in {who["pid"] for who in watch.who.values()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return outcome


def by_launch(row: Row, folder: Path, watch: Watch) -> tuple[str, str]:
    import axes

    call = row.size, str(folder), row.fault, row.phase, row.moment
    try:
        axes.launch(program, *call, timeout=START + 2 * RANK_LIMIT)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), ""
    return "", ""


def by_torchrun(row: Row, folder: Path, watch: Watch) -> tuple[str, str]:
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.size)
    job = "tests/fault_program.py", str(folder), row.fault, row.phase, row.moment
    return by_a_process(row, folder, watch, *torchrun, *job)


def by_a_process(row: Row, folder: Path, watch: Watch, *arguments: str) -> tuple[str, str]:
    """Ranks of a launcher that is a process of its own."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, *arguments]
    with open(folder / "log", "ab") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        waited(lambda: launcher.poll() is not None or watch.fault_at, START)
        if row.fault == "store stopped" and waited(lambda: watch.all_ended, RANK_LIMIT):
            os.kill(launcher.pid, signal.SIGCONT)  # whoever stopped it lets it go on
        ended = waited(lambda: launcher.poll() is not None, 2 * RANK_LIMIT + TORCHRUNS_PATIENCE["SIGSTOP"])
    finally:
        launcher.kill()
        launcher.wait()
    return ("" if ended else "the launcher didn't end") + (folder / "log").read_text(errors="replace"), ""


def on_two_hosts(row: Row, folder: Path, watch: Watch) -> tuple[str, str]:
    environ = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    command = ["bash", str(ROOT / "tests/hosts.sh"), str(folder), "1", "-m", "tests.fault_program"]
    command += [str(folder), row.fault, row.phase, row.moment]
    script = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = script.communicate(timeout=280)
    finally:
        script.terminate()  # which takes its namespaces along
        script.wait()
    if script.returncode == NO_NAMESPACES:
        return "", said.strip()
    hosts = [(folder / f"host{host}.log").read_text() for host in (0, 1)]
    return "\n".join([said, *hosts]), ""


# ---------------------------------------------------------------------------- all rows


def run_all(rows: Sequence[Row], done: Callable[[Outcome], None], at_once: int) -> None:
    """Runs rows, some at a time: they mostly wait."""
    with ThreadPoolExecutor(at_once) as threads:
        for outcome in threads.map(run, rows):
            done(outcome)


def table(outcomes: Mapping[Row, Outcome]) -> str:
    """The matrix as the page has it."""
    lines = []
    for launcher in LAUNCHERS:
        lines += [f"| {launcher} | phase | before | in | after |", "| --- | --- | --- | --- | --- |"]
        for fault in FAULTS:
            for phase in PHASES:
                rows = [Row(launcher, fault, phase, moment) for moment in MOMENTS]
                if rows[0] in ROWS:
                    lines.append(f"| {fault} | {phase} | {' | '.join(outcomes[row].cell() for row in rows)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


BEGIN, END_OF_TABLE = "<!-- the table of tests/faults.py -->\n", "<!-- its end -->\n"


def with_table(page: str, text: str) -> str:
    """The page with this table in place of its own."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n\n{END_OF_TABLE}{rest.partition(END_OF_TABLE)[2]}"


def main() -> int:
    chosen = [row for row in ROWS if all(word in str(row) for word in sys.argv[1:])]
    outcomes: dict[Row, Outcome] = {}

    def done(outcome: Outcome) -> None:
        outcomes[outcome.row] = outcome
        print("\n    ".join([f"{outcome.row}: {outcome.skipped or outcome.cell()}", *outcome.wrong()]), flush=True)

    run_all(chosen, done, at_once=4)
    if chosen == ROWS:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(outcomes)), encoding="utf-8")
    wrong = sum(bool(outcome.wrong()) for outcome in outcomes.values())
    print(f"{len(chosen)} faults, {wrong} not as promised")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
