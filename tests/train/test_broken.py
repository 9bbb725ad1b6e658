"""Runs that break: two in one folder, killed processes, losses that are not finite, full disks."""

import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bcosvit.files import locked_file, locked_folder
from bcosvit.train.checkpoints import read_checkpoint
from bcosvit.train.losses import BinaryCrossEntropy
from tests.train.support import DATA, assert_same_run, model_config, recipe, train

SCRIPT = """
import os, signal, sys, time
import torch.utils.data
from bcosvit.train import train
from bcosvit.train.data import ImageDataset
from bcosvit.train.losses import BinaryCrossEntropy
from bcosvit.train.task import Task
from tests.train.support import DATA, model_config, recipe

step, load, loss = Task.training_step, ImageDataset.__getitem__, BinaryCrossEntropy.__call__
factor, begun = 1.0, 0
reading = sys.argv[1] + ".reading"

def losses(*given):
    return loss(*given) * factor

def training_step(self, batch, batch_idx):
    global factor
    factor = 1.0
    if self.trainer.global_step == 5:
        if "{kill}" == "nan" and self.global_rank == 1:
            factor = float("nan")
        if "{kill}" == str(self.global_rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if "{kill}" == "error":
            while not os.path.exists(reading):
                time.sleep(0.01)
            raise ValueError("This is the error.")
    return step(self, batch, batch_idx)

def getitem(self, requests):
    global begun
    if "{kill}" == "reader" and requests[0].epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "{kill}" == "error" and requests[0].epoch == 1:
        begun += 1
        if begun == 2:
            open(reading, "w").close()
            time.sleep(1000)
    return load(self, requests)

Task.training_step, ImageDataset.__getitem__ = training_step, getitem
BinaryCrossEntropy.__call__ = losses
if "{kill}" == "error":
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1000
try:
    train(
        DATA,
        out=sys.argv[1],
        model=model_config(),
        recipe=recipe(num_workers={workers}),
        devices={devices},
        accelerator="cpu",
    )
except ValueError as error:
    print(f"Error: {{error}}", file=sys.stderr, flush=True)
    raise SystemExit(2)
"""


def run_script(folder: Path, kill: str, *, workers: int = 0, devices: int = 1) -> tuple[int, str]:
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT.format(kill=kill, workers=workers, devices=devices))
    process = subprocess.Popen(
        [sys.executable, script, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Ends with the last process that holds the pipe, so that none is left behind.
    said = process.communicate(timeout=300)[1]
    return process.returncode, said


def test_of_two_runs_in_a_folder_the_second_is_told(tmp_path):
    folder = tmp_path / "run"
    with (
        locked_folder(folder),
        pytest.raises(ValueError, match=r"Another process is writing to .*run"),
    ):
        train(DATA, out=folder, model=model_config(), recipe=recipe(epochs=1))
    run = train(DATA, out=folder, model=model_config(), recipe=recipe(epochs=1))
    with locked_folder(folder), pytest.raises(ValueError, match="Another process"):
        train(out=folder, resume=True)
    assert not [path.name for path in run.folder.glob(".*")]


@pytest.mark.parametrize("kind", ["locked_folder", "locked_file"])
def test_a_lock_ends_with_its_process_not_with_the_processes_that_it_started(tmp_path, kind):
    path = tmp_path / "out"
    code = (
        f"import os, sys, time; from bcosvit.files import {kind}\n"
        f"with {kind}(sys.argv[1]):\n"
        "    if os.fork() == 0:\n"
        # The child says so: it may begin to run long after the fork.
        "        print('locked', flush=True)\n"
        "        time.sleep(30)\n"
        "        os._exit(0)\n"
        "    time.sleep(100)\n"
    )
    lock = {"locked_folder": locked_folder, "locked_file": locked_file}[kind]
    command = [sys.executable, "-W", "ignore", "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="Another process"), lock(path):
            pytest.fail("It was locked.")
        holder.kill()
        holder.wait()
        with lock(path):
            pass
        # The child that slept.
        os.killpg(holder.pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == ([path] if kind == "locked_folder" else [])


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_images(tmp_path, monkeypatch):
    original, calls = BinaryCrossEntropy.__call__, -1000
    module = importlib.import_module("bcosvit.train.run")
    measure = module.fit_to_machine

    def measured(*args):
        # The steps that are measured before the run do not count.
        nonlocal calls
        plan = measure(*args)
        calls = 0
        return plan

    def diverge(*args):
        nonlocal calls
        calls += 1
        return original(*args) * (float("nan") if calls == 8 else 1)

    monkeypatch.setattr(module, "fit_to_machine", measured)
    monkeypatch.setattr(BinaryCrossEntropy, "__call__", diverge)
    folder = tmp_path / "run"
    # Four steps and two batches of validation in the first epoch, then two steps.
    with pytest.raises(ValueError, match=r"diverged: the loss of step 6, epoch 2") as said:
        train(DATA, out=folder, model=model_config(), recipe=recipe())
    assert "scenes/train/" in str(said.value) and "learning_rate" in str(said.value)
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 4
    assert "nan" not in (folder / "metrics.csv").read_text()


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    from bcosvit.train.task import Task

    original = Task.on_validation_epoch_start

    def poison(self):
        original(self)
        with torch.no_grad():
            # It changes no logit, so that the loss does not show it.
            self.model.register_buffer("unused", torch.full((2,), float("inf")))

    monkeypatch.setattr(Task, "on_validation_epoch_start", poison)
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=r"diverged: weights \(unused\) are not finite"):
        train(
            DATA, out=folder, model=model_config(), recipe=recipe(ema=None, checkpoint_steps=None)
        )
    assert not (folder / "best.safetensors").exists() and not (folder / "README.md").exists()
    assert not (folder / "last.ckpt").exists()


def test_a_validation_that_is_not_finite_saves_nothing(tmp_path, monkeypatch):
    from bcosvit.train.task import Task

    original = Task.validation_step

    def poison(self, batch, batch_idx):
        original(self, batch, batch_idx)
        self.val_means["loss"].total.fill_(float("nan"))

    monkeypatch.setattr(Task, "validation_step", poison)
    with pytest.raises(ValueError, match="the validation loss after epoch 1 is not finite"):
        train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe())
    assert not (tmp_path / "run" / "best.safetensors").exists()


@pytest.mark.slow
def test_after_an_error_workers_end_at_once(tmp_path):
    # They are in the middle of a batch, where torch would wait longer than `run_script` does.
    code, said = run_script(tmp_path / "run", "error", workers=2)
    assert code == 2 and said.strip() == "Error: This is the error."


def test_a_killed_reader_is_told_and_the_run_resumes(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    code, said = run_script(folder, "reader", workers=1)
    assert code == 2, said
    assert "A process that reads images (pid" in said and "Traceback" not in said
    assert f"bcosvit train --resume --out {folder}" in said
    train(out=folder, resume=True)
    train(DATA, out=whole, model=model_config(), recipe=recipe())
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "says"),
    [("0", "The first of 2 processes of this run"), ("1", "Process 2 of 2 of this run")],
)
def test_a_killed_process_of_several_is_told_by_another(tmp_path, rank, says):
    folder = tmp_path / "run"
    code, said = run_script(folder, rank, devices=2)
    assert code in (1, -signal.SIGKILL)
    assert said.count(says) == 1 and "was killed" in said
    assert f"bcosvit train --resume --out {folder}" in said
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 4


@pytest.mark.slow
def test_a_loss_that_is_not_finite_in_one_of_two_processes_ends_both(tmp_path):
    folder = tmp_path / "run"
    code, said = run_script(folder, "nan", devices=2)
    assert code == 2, said
    # Both processes say so, although one of them had the loss.
    assert said.count("Error: Training diverged: the loss of step 6, epoch 2") == 2, said
    assert "scenes/train/" in said and "Traceback" not in said
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 4
    assert "nan" not in (folder / "metrics.csv").read_text()


def test_the_same_command_twice_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        train(DATA, out=tmp_path / name, model=model_config(), recipe=recipe(epochs=1))
    for name in ("best.safetensors", "README.md", "metrics.csv"):
        one, two = ((tmp_path / run / name).read_bytes() for run in ("one", "two"))
        assert one == two, name


def test_a_disk_that_is_full_when_weights_are_written_is_told(tmp_path):
    whole = train(DATA, out=tmp_path / "whole", model=model_config(), recipe=recipe()).folder
    size = (whole / "best.safetensors").stat().st_size
    folder = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, limits[1]))
        with pytest.raises(ValueError, match=r"File too large.*--resume"):
            train(
                DATA,
                out=folder,
                model=model_config(),
                recipe=recipe(checkpoint_steps=None),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not (folder / "best.safetensors").exists()
    assert not list(folder.glob(".*"))
    train(out=folder, resume=True)
    assert (folder / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()


def test_a_disk_that_is_full_when_the_log_is_written_is_told_once(tmp_path, monkeypatch, capfd):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(ValueError, match=r"no space left in .*--resume"):
        train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe(epochs=1))
    # The thread that writes the log raises the same error.
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_that_was_killed_after_its_last_step_is_completed(tmp_path, monkeypatch):
    from bcosvit.train.callbacks import History

    def draw(self: History) -> None:
        (self.folder / "curves.png").write_bytes(b"drawn")

    monkeypatch.setattr(History, "_write_curves", draw)
    run = train(DATA, out=tmp_path / "run", model=model_config(), recipe=recipe(epochs=1))
    rows = (run.folder / "metrics.csv").read_bytes()
    for name in ("curves.png", "metrics.csv"):
        (run.folder / name).unlink()
    train(out=run.folder, resume=True)
    assert (run.folder / "curves.png").exists()
    assert (run.folder / "metrics.csv").read_bytes() == rows
