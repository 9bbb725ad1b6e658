"""A run that is killed, stopped or robbed of its disk ends as one that never was."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bcosvit.train import Stopped
from bcosvit.train.callbacks import BestModel, History
from bcosvit.train.checkpoints import ChecksummedIO, read_checkpoint
from bcosvit.train.task import Task
from tests.train.support import DATA, assert_same_run, model_config, recipe, train

STEPS = 12


class PowerCutError(BaseException):
    """As if the process ended here: nothing of ours catches it."""


def cut_power(monkeypatch, owner: type, method: str, after: int) -> None:
    """The process ends on entering ``method`` for the ``after``-th time."""
    original, calls = getattr(owner, method), 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == after:
            raise PowerCutError
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, counted)


KILLED = """
import os, signal, sys
from bcosvit.train.task import Task
from tests.train.support import DATA, model_config, recipe, train

step, original, calls = int(sys.argv[2]), Task.training_step, 0

def killed(self, batch, batch_idx):
    global calls
    calls += 1
    if calls == step:
        os.kill(os.getpid(), signal.{signal})
    return original(self, batch, batch_idx)

Task.training_step = killed
try:
    train(DATA, out=sys.argv[1], model=model_config(), recipe=recipe(num_workers=1))
except Exception as error:
    print(type(error).__name__, error)
    raise SystemExit(3)
"""


def run_killed(folder: Path, step: int, signal_: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", KILLED.format(signal=signal_), str(folder), str(step)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_killed_at_a_random_step_it_resumes_to_the_same_bits(whole, tmp_path):
    step = random.SystemRandom().randint(1, STEPS)
    folder = tmp_path / "killed"
    killed = run_killed(folder, step, "SIGKILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


@pytest.mark.parametrize(
    ("owner", "method", "after"),
    [
        (Task, "training_step", 2),  # before any checkpoint
        (Task, "validation_step", 3),  # after an epoch's last step, before its checkpoint
        (BestModel, "_card", 1),  # between the best weights and their card
        (ChecksummedIO, "save_checkpoint", 4),  # instead of a checkpoint
    ],
)
def test_a_power_cut_anywhere_leaves_no_trace(whole, tmp_path, monkeypatch, owner, method, after):
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        cut_power(patch, owner, method, after)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_power_cut_at_every_step_leaves_no_trace(whole, tmp_path, monkeypatch, step):
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", step)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


@pytest.mark.parametrize(
    ("workers", "after"),
    [(0, 6), (1, 9)],  # in the middle of a step; where a worker reads ahead into another epoch
)
def test_accumulated_batches_and_workers_resume_as_well(tmp_path, monkeypatch, workers, after):
    ways = recipe(accumulate_grad_batches=2, epochs=2, num_workers=workers)
    train(DATA, out=tmp_path / "whole", model=model_config(), recipe=ways)
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", after)
        with pytest.raises(PowerCutError):
            train(DATA, out=tmp_path / "cut", model=model_config(), recipe=ways)
    train(out=tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    whole, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", 7)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    last = folder / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == 6
    assert read_checkpoint(folder / "previous.ckpt")["global_step"] == 4
    os.truncate(last, last.stat().st_size // 2)
    train(out=folder, resume=True)
    said = capsys.readouterr().out
    assert f"{last} is damaged" in said and "checkpoint before it" in said
    assert "previous.ckpt, step 4" in said
    assert_same_run(whole, folder)


def test_where_every_checkpoint_is_damaged_it_says_so(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", 7)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    for name in ("last.ckpt", "previous.ckpt"):
        (folder / name).write_bytes(b"no")
    with pytest.raises(ValueError, match=r"last.ckpt is damaged.*previous.ckpt is damaged"):
        train(out=folder, resume=True)


def test_a_full_disk_costs_nothing_that_was_saved(whole, tmp_path, monkeypatch):
    folder = tmp_path / "full"
    with monkeypatch.context() as patch:
        fill_disk(patch, after=3)
        with pytest.raises(ValueError, match=r"step 6 .*No space left") as full:
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    assert "--resume" in str(full.value)
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 4
    assert read_checkpoint(folder / "previous.ckpt")["global_step"] == 2
    assert [path.name for path in folder.glob(".*")] == []
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


def test_a_full_disk_is_told_whatever_was_being_written(tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(History, "_write_csv", full)
    with pytest.raises(ValueError, match=r"no space left in .*--resume"):
        train(DATA, out=tmp_path / "full", model=model_config(), recipe=recipe())
    assert read_checkpoint(tmp_path / "full" / "last.ckpt")["global_step"] == 2


def fill_disk(monkeypatch, after: int) -> None:
    """From the ``after``-th checkpoint on the disk is full when half of it is written."""
    original, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".ckpt"):
            calls += 1
            # Each checkpoint is synced twice: by its writer, and by whoever renames it.
            if calls > 2 * (after - 1):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(whole, tmp_path, monkeypatch, name):
    folder, number = tmp_path / "stopped", getattr(signal, name)
    before = signal.getsignal(number)
    original = Task.training_step

    def asked(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            os.kill(os.getpid(), number)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "training_step", asked)
        with pytest.raises(Stopped) as stopped:
            train(DATA, out=folder, model=model_config(), recipe=recipe(checkpoint_steps=None))
    assert f"bcosvit train --resume --out {folder}" in str(stopped.value)
    assert "Stopped after step 6 of 12" in str(stopped.value)
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 6
    assert signal.getsignal(number) == before
    train(out=folder, resume=True)
    assert_same_run(whole, folder)


def test_a_finished_run_resumes_to_itself(whole, tmp_path, capsys):
    before = (whole / "metrics.csv").read_bytes()
    run = train(out=whole, resume=True)
    assert (whole / "metrics.csv").read_bytes() == before
    assert len(run.rows) == 3


@pytest.mark.parametrize(("minutes", "steps"), [(1e-9, [*range(1, 13)]), (1e9, [4, 8, 12])])
def test_checkpoints_by_time(tmp_path, monkeypatch, minutes, steps):
    saved = []
    monkeypatch.setattr(ChecksummedIO, "save_checkpoint", lambda _, c, *a, **k: saved.append(c))
    timed = recipe(checkpoint_steps=None, checkpoint_minutes=minutes)
    train(DATA, out=tmp_path / "run", model=model_config(), recipe=timed)
    assert [checkpoint["global_step"] for checkpoint in saved] == steps
