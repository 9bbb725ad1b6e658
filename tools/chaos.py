"""Kills, full disks, second writers: what can be seen is whole or absent, every result the same.

    python tools/chaos.py [--kills 25] [--seed 0] [--jobs 1] [--only train,explain]

Commands of bcosvit (train, evaluate, export, explain, reproduce, audit) are run on drawn scenes and
a small model, once in peace, and then killed with SIGKILL, together with their workers, at moments
drawn from the seed, in processor time. After every kill, all files whose names do not start with a
dot are checked: pictures and tables are complete, JSON and pages parse, weights load, checkpoints
match their checksums. Then the command is given again (``train`` with ``--resume``), and what it
leaves is compared with what the undisturbed one left, to the byte where the file has no time in it.
At last the disk is full, the disk is read-only, a command is given while another one is stopped
with its lock, and in a run an error is raised, a process that reads images is killed, and one of
two training processes is killed.

Full and read-only disks are memory file systems in a name space of their own, for which Linux's
``unshare`` is needed.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# What a file may contain that is not the same in every run.
TIMES = re.compile(
    r"\d\d\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?|\d+(\.\d+)? (s|seconds|minutes|images/s)\b"
)
SIZE = "scenes?size=32&train=48&val=16"


@dataclass(frozen=True)
class Command:
    """A command of bcosvit.

    Args:
        name: The command.
        arguments: Its arguments; ``{out}`` stands for a folder.
        again: Arguments to continue with; by default the same ones.
        same: Endings of the files that must be the same to the byte.
        shared: Whether several processes may write to one folder.
    """

    name: str
    arguments: tuple[str, ...]
    again: tuple[str, ...] | None = None
    same: tuple[str, ...] = ()
    shared: bool = False


def settings(**values: object) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def commands(work: Path) -> list[Command]:
    weights = str(work / "model.safetensors")
    train = [SIZE, "--out", "{out}/run", *settings(epochs=4, batch_size=16, num_workers=1)]
    train += settings(checkpoint_steps=2, explain_every=2, localize_every=2)
    evaluate = ["--weights", weights, "--data", SIZE, "--out", "{out}", "--grids", "4"]
    # An untrained model has no confident images for the grid pointing game.
    evaluate += ["--images", "4", "--device", "cpu", "--metrics", "accuracy,perturbation"]
    explain = [str(work / "pictures"), "--weights", weights, "--out", "{out}/report.html"]
    explain += ["--npz", "{out}/arrays", "--png", "{out}/maps", "--json", "{out}/sums.json"]
    small = {
        "epochs": 2,
        "backbone.epochs": 1,
        "warmup_epochs": 0,
        "batch_size": 16,
        "image_size": 32,
        "model.width": 16,
        "model.num_heads": 2,
        "model.depth": 1,
        "densenet.growth": 4,
        "densenet.blocks": "(2,1,1)",
        "densenet.stem_width": 8,
        "num_workers": 0,
    }
    reproduce = ["accuracy", "--data", SIZE, "--out", "{out}", "--sizes", "ti", "--taps", "38"]
    reproduce += ["--recipe", "quick", "--device", "cpu", *settings(**small)]
    audit = ["--weights", weights, "--data", SIZE, "--out", "{out}", "--pairs", "12"]
    return [
        Command(
            "train",
            tuple(train),
            again=("--resume", "--out", "{out}/run"),
            same=("metrics.csv", "best.safetensors"),
        ),
        Command("evaluate", tuple(evaluate), same=(".csv", "summary.json")),
        Command("export", ("--weights", weights, "--out", "{out}/model.onnx")),
        Command("explain", (*explain, "--device", "cpu"), same=(".npz", ".png", ".json")),
        Command("reproduce", tuple(reproduce), same=(".csv", "best.safetensors"), shared=True),
        Command("audit", (*audit, "--device", "cpu"), same=(".csv", ".npz", ".json")),
    ]


def prepare(work: Path) -> None:
    """A small model and a few pictures."""
    import torch

    import bcosvit
    from bcosvit.data.scenes import Scenes

    torch.manual_seed(0)
    stem = bcosvit.StemConfig(widths=(8, 12))
    config = bcosvit.ModelConfig(
        width=12, num_heads=3, depth=2, mlp_ratio=2, image_size=32, num_classes=8, backbone=stem
    )
    notes = {"bcosvit.classes": json.dumps(Scenes.classes)}
    bcosvit.save(bcosvit.create_model(config), work / "model.safetensors", metadata=notes)
    (work / "pictures").mkdir()
    scenes = Scenes("val", size=48, length=12)
    for number in range(12):
        scenes[number].image.save(work / "pictures" / f"{number}.png")


def arguments(command: Command, out: Path, again: bool = False) -> list[str]:
    chosen = command.again if again and command.again else command.arguments
    filled = [part.replace("{out}", str(out)) for part in chosen]
    return [sys.executable, "-m", "bcosvit", command.name, *filled]


def run(line: list[str], **options: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=900, **options
    )  # type: ignore[call-overload]


# --- Whole or absent


def check_file(path: Path) -> None:
    """Raises what shows that a file is not whole."""
    match path.suffix:
        case ".safetensors" if path.name.startswith("evidence"):
            from safetensors.numpy import load_file

            load_file(path)
        case ".safetensors":
            import bcosvit

            bcosvit.load(path)
        case ".ckpt":
            from bcosvit.train.checkpoints import read_checkpoint

            read_checkpoint(path)
        case ".json":
            json.loads(path.read_text())
        case ".csv":
            text = path.read_text()
            rows = list(csv.reader(text.splitlines()))
            whole = text.endswith("\n") and len({len(row) for row in rows}) == 1
            assert whole or not text, "ragged"
        case ".png" | ".jpg":
            from bcosvit.data.images import read_image

            read_image(path)
        case ".npz":
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
        case ".html":
            assert path.read_text().rstrip().endswith("</html>"), "no end"
        case ".svg":
            assert path.read_text().rstrip().endswith("</svg>"), "no end"
        case ".onnx":
            import onnx

            onnx.checker.check_model(onnx.load(path))
        case ".yaml":
            import yaml

            assert isinstance(yaml.safe_load(path.read_text()), dict)
        case ".md" | ".txt":
            assert path.read_text().endswith("\n"), "no end"


def visible(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    hidden = [any(part.startswith(".") for part in p.relative_to(folder).parts) for p in found]
    return [path for path, is_hidden in zip(found, hidden, strict=True) if not is_hidden]


def broken(folder: Path) -> list[str]:
    """What is there but not whole."""
    wrong = []
    for path in visible(folder):
        if path.suffix == ".lock" or "events.out" in path.name or path.name.startswith("cache."):
            continue  # a log that grows, and a file that records which of its parts are done
        try:
            check_file(path)
        except Exception as error:
            wrong.append(f"{path.relative_to(folder)}: {type(error).__name__} {str(error)[:150]}")
    return wrong


def differences(command: Command, one: Path, other: Path) -> list[str]:
    """Files that only one of two folders has, or that should be the same and are not."""
    names = [{str(path.relative_to(f)) for path in visible(f)} for f in (one, other)]
    own = {name for name in names[0] ^ names[1] if "events.out" not in name}
    found = [f"only one has {name}" for name in sorted(own) if not name.endswith(".lock")]
    for name in sorted(names[0] & names[1]):
        if name.endswith(command.same):
            a, b = ((folder / name).read_bytes() for folder in (one, other))
            if name.endswith((".csv", ".json")):
                texts = (x.decode() for x in (a, b))
                pairs = zip(texts, (one, other), strict=True)
                a, b = (TIMES.sub("", t.replace(str(f), "")).encode() for t, f in pairs)
            if a != b:
                found.append(f"{name} differs")
    return found


# --- What goes wrong


def spent(process: int) -> float:
    """Seconds of processor time of a process and all that it started."""
    ticks = 0
    with contextlib.suppress(OSError):
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # Its own, and what its children had spent that have ended.
        ticks = sum(map(int, numbers[11:15]))
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        seconds += sum(spent(int(child)) for child in children)
    return seconds


def start(command: Command, out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        arguments(command, out),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def needed(command: Command, out: Path) -> float:
    """Runs the command; returns the processor time that it took, however busy the machine is."""
    seconds = 0.0
    with start(command, out) as process:
        while process.poll() is None:
            seconds = max(seconds, spent(process.pid))
            time.sleep(0.02)
    return seconds


def kill(command: Command, out: Path, seconds: float) -> bool:
    """Starts the command, and kills it and its workers after so much processor time.

    Returns:
        False if it was done before.
    """
    with start(command, out) as process:
        while process.poll() is None:
            if spent(process.pid) >= seconds:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return process.returncode == -signal.SIGKILL
            time.sleep(0.01)
    return False


def one_sentence(done: subprocess.CompletedProcess) -> list[str]:
    """What is wrong with how a command refused."""
    text = (done.stdout + done.stderr).strip()
    if done.returncode == 0:
        return ["it succeeded"]
    return [f"traceback: {text[-300:]}"] if "Traceback" in text else []


INSIDE = """
mount -t tmpfs -o size={size} tmpfs '{disk}' && {before} || exit 98
{command}
code=$?
{checker} --inspect '{disk}' || exit 99
exit $code
"""


def on_disk(command: Command, disk: Path, size: str, read_only: bool) -> tuple[list[str], str]:
    """Runs the command on a memory file system; what is wrong, and what it said."""
    disk.mkdir()
    script = INSIDE.format(
        size=size,
        disk=disk,
        before=f"mount -o remount,ro '{disk}'" if read_only else "true",
        command=" ".join(f"'{part}'" for part in arguments(command, disk)),
        checker=f"'{sys.executable}' '{__file__}'",
    )
    done = run(["unshare", "-Urm", "sh", "-c", script])
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 98 or "unshare" in said:
        return [f"no memory file system can be made here: {said[-200:]}"], ""
    if done.returncode == 99:
        return [f"a file is not whole: {said[-300:]}"], said
    return one_sentence(done), said


def holds_lock(process: int, out: Path) -> bool:
    """Whether a process has locked one of the folders below ``out``, or a file to be written."""
    lockable = set()
    for path in (out, *out.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # what is gone again
            if path.is_dir() or "-lock" in path.name:
                lockable.add(path.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        match = re.search(r"FLOCK +ADVISORY +WRITE +(\d+) +\w+:\w+:(\d+)", line)
        if match and int(match[1]) == process and int(match[2]) in lockable:
            return True
    return False


def two_at_once(command: Command, reference: Path, out: Path) -> tuple[list[str], str]:
    """Stops a command while it holds its lock, gives it a second time, and lets the first go on.

    So that they overlap for certain: the second has to be refused, and the first is undisturbed. Of
    a command that shares its folder, both have to end with the same results.
    """
    if command.shared:
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(run, [arguments(command, out)] * 2))
        wrong = [f"one failed: {done.stderr[-200:]}" for done in both if done.returncode]
        return wrong + broken(out) + differences(command, reference, out), "both at work"
    line, options = arguments(command, out), {"stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        line, env=environment, stderr=subprocess.STDOUT, start_new_session=True, **options
    ) as first:
        while first.poll() is None and not holds_lock(first.pid, out):
            time.sleep(0.001)
        if first.poll() is not None:
            return ["it was never seen with a lock"], ""
        os.killpg(first.pid, signal.SIGSTOP)
        try:
            locked = holds_lock(first.pid, out)
            second = run(line)
        finally:
            os.killpg(first.pid, signal.SIGCONT)
        said = first.communicate(timeout=900)[0]
    wrong = one_sentence(second)
    if "Another process is writing" not in second.stdout + second.stderr:
        wrong.append(f"it does not say why: {(second.stdout + second.stderr)[-200:]}")
    if not locked:
        wrong.append("the first one had lost its lock again")
    if first.returncode:
        wrong.append(f"the first one failed: {said[-200:]}")
    codes = f"exit codes {first.returncode} and {second.returncode}"
    return wrong + broken(out) + differences(command, reference, out), codes


ENDINGS = {"error raised": 3.0, "reader killed": 30.0, "process killed": 30.0}
"""What happens inside of a run, and within how many seconds it has to end after that."""

ENDING = """
import os, signal, sys, time
from pathlib import Path
import bcosvit
from bcosvit.train import train
from bcosvit.train.data import ImageDataset
from bcosvit.train.task import Task

kind, out, data = sys.argv[1:]
step, load = Task.training_step, ImageDataset.__getitem__

def now():
    Path(out + ".moment").write_text(str(time.time()))

def training_step(self, batch, batch_idx):
    if self.trainer.global_step == 5:
        if kind == "error raised":
            now()
            raise ValueError("This is the error.")
        if kind == "process killed" and self.global_rank == 1:
            now()
            os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, batch_idx)

def getitem(self, requests):
    if kind == "reader killed" and requests[0].epoch == 1:
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    return load(self, requests)

Task.training_step, ImageDataset.__getitem__ = training_step, getitem
stem = bcosvit.StemConfig(widths=(8, 12))
sizes = {"width": 12, "num_heads": 3, "depth": 2, "mlp_ratio": 2, "image_size": 32}
small = {"epochs": 3, "warmup_epochs": 0, "batch_size": 16, "checkpoint_steps": 2}
small["num_workers"] = 0 if kind == "process killed" else 2
try:
    train(
        data,
        out=out,
        model=bcosvit.ModelConfig(**sizes, num_classes=8, backbone=stem),
        recipe="quick",
        settings=small,
        accelerator="cpu",
        devices=2 if kind == "process killed" else 1,
    )
except ValueError as error:
    print(f"Error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
"""


def ending(kind: str, out: Path) -> tuple[list[str], str]:
    """Something happens in a run: how long its processes last, and what they say."""
    script = out.with_suffix(".py")
    script.write_text(ENDING)
    # The pipe is open until the last process ends.
    done = run([sys.executable, str(script), kind, str(out), SIZE])
    seconds = time.time() - float(Path(f"{out}.moment").read_text())
    wrong = one_sentence(done)
    if seconds > ENDINGS[kind]:
        wrong.append(f"more than {ENDINGS[kind]:g} s")
    wrong += broken(out)
    lines = [line for line in done.stderr.splitlines() if "rror" in line or "killed" in line]
    return wrong, f"ended after {seconds:.1f} s: {' '.join(lines)[-300:]}"


def main() -> None:
    if sys.argv[1:2] == ["--inspect"]:
        wrong = broken(Path(sys.argv[2]))
        print("\n".join(wrong))
        raise SystemExit(bool(wrong))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--only", help="some of the commands, separated by commas")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    findings: list[str] = []

    def report(title: str, wrong: list[str], note: str = "") -> None:
        print(f"{title}: {'fine' if not wrong else '; '.join(wrong)} {note}".rstrip(), flush=True)
        findings.extend(f"{title}: {text}" for text in wrong)

    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        work = Path(name)
        prepare(work)
        every = commands(work)
        if options.only:
            every = [command for command in every if command.name in options.only.split(",")]
        whole, seconds = {}, {}

        def in_peace(command: Command) -> None:
            out = whole[command.name] = work / f"{command.name}-whole"
            done = run(arguments(command, out))
            seconds[command.name] = needed(command, work / f"{command.name}-measured")
            wrong = [f"exit {done.returncode}: {done.stderr[-400:]}"] if done.returncode else []
            note = f"{seconds[command.name]:.0f} s of processor time"
            report(f"{command.name} in peace", wrong + broken(out), note)

        def killed(number: int, share: float) -> bool:
            command = every[number % len(every)]
            moment = seconds[command.name] * share
            out = work / f"{command.name}-{number}"
            running = kill(command, out, moment)
            wrong = [f"after the kill {text}" for text in broken(out)] if out.exists() else []
            left = len(visible(out)) if out.exists() else 0
            begun = command.again is not None and (out / "run" / "run.yaml").exists()
            done = run(arguments(command, out, again=begun))
            if done.returncode:
                wrong.append(f"it does not continue: {(done.stdout + done.stderr)[-400:]}")
            else:
                wrong += broken(out) + differences(command, whole[command.name], out)
            report(f"{command.name} killed after {moment:.1f} s", wrong, f"{left} files were there")
            shutil.rmtree(out, ignore_errors=True)
            return running

        def spoiled(command: Command) -> None:
            size = "4k" if command.name != "train" else "64k"
            name = command.name
            full = on_disk(command, work / f"{name}-full", size, False)
            report(f"{name} on a full disk", *full)
            read_only = on_disk(command, work / f"{name}-read-only", "64k", True)
            report(f"{name} on a read-only disk", *read_only)
            two = two_at_once(command, whole[name], work / f"{name}-two")
            report(f"{name} twice at once", *two)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(in_peace, every))
            # Imports take the first part of every command, in which there is nothing to lose.
            shares = [draw.uniform(0.25, 0.95) for _ in range(options.kills)]
            running = sum(pool.map(killed, range(options.kills), shares))
            few = [] if running >= 0.8 * options.kills else ["too few for a check"]
            report(f"{running} of {options.kills} were running when they were killed", few)
            list(pool.map(spoiled, every))
        for kind in ENDINGS if not options.only or "train" in options.only else ():
            report(f"train, {kind}", *ending(kind, work / kind.split()[0]))
    print(f"{len(findings)} findings")
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
