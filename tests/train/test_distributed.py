"""Several processes are one, but for rounding."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bcosvit.train.checkpoints import read_checkpoint
from bcosvit.train.devices import Devices
from tests.train.support import DATA, model_config, recipe, rows, train

# Started again by Lightning for the second process, so it must be a file of its own.
SCRIPT = """
import sys
from bcosvit.train import Stopped, train
from tests.train.support import DATA, model_config, recipe

try:
    train(
        DATA,
        out=sys.argv[1],
        model=model_config(),
        recipe=recipe(**eval(sys.argv[2])),
        resume="--resume" in sys.argv,
        devices=2,
        accelerator="cpu",
    )
except Stopped as stopped:
    if str(stopped):
        print(stopped, flush=True)
        raise SystemExit(130)
"""


def start(folder: Path, changes: dict, *options: str) -> subprocess.Popen:
    script = folder.with_suffix(".py")
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, script, folder, repr(changes), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out


def assert_close(one: Path, other: Path) -> None:
    for mine, theirs in zip(rows(one), rows(other), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    mine, theirs = read_checkpoint(one / "last.ckpt"), read_checkpoint(other / "last.ckpt")
    for part in ("state_dict", "current_model_state"):
        for name, tensor in mine[part].items():
            # A softmax does not see what is added to all keys: the gradient of their bias is
            # nothing but rounding, which Adam blows up to full steps.
            if name.endswith("key.bias"):
                continue
            torch.testing.assert_close(tensor, theirs[part][name], atol=1e-5, rtol=0, msg=name)


def test_two_processes_end_where_one_does(whole, tmp_path):
    folder = tmp_path / "two"
    process = start(folder, {})
    said = finish(process)
    assert said.count("epoch 3/3") == 1
    assert_close(whole, folder)


@pytest.mark.slow
def test_two_processes_resume_what_one_began(whole, tmp_path, monkeypatch):
    from tests.train.test_resume import PowerCutError, Task, cut_power

    folder = tmp_path / "two"
    with monkeypatch.context() as patch:
        cut_power(patch, Task, "training_step", 8)
        with pytest.raises(PowerCutError):
            train(DATA, out=folder, model=model_config(), recipe=recipe())
    finish(start(folder, {}, "--resume"))
    assert_close(whole, folder)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_and_one_resumes(whole, tmp_path):
    folder = tmp_path / "stopped"
    process = start(folder, {"epochs": 200})
    while not (folder / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = finish(process, 130)
    assert "To continue: bcosvit train --resume" in said
    assert "--devices 2 --accelerator cpu" in said
    step = read_checkpoint(folder / "last.ckpt")["global_step"]
    assert f"Stopped after step {step} of" in said


def test_batches_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ValueError, match="3 devices"):
        Devices(devices=3).check(recipe())


@pytest.mark.parametrize(
    "changes", [{"clip": "adaptive", "ema": None}, {"clip": "norm", "ema": None}, {"clip": "none"}]
)
def test_what_sharding_cannot_do_is_refused(changes):
    with pytest.raises(ValueError, match="fsdp"):
        Devices(devices=2, strategy="fsdp").check(recipe(**changes))


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bcosvit import create_model
from tests.conftest import small_config

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
losses = {}
for kind in ("whole", "sharded"):
    torch.manual_seed(0)
    model = create_model(small_config()).train()
    rows = slice(0, 8)
    if kind == "sharded":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        rows = slice(4 * rank, 4 * rank + 4)
    # So small that the loss falls: rounding would grow as it does.
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    losses[kind] = []
    for _ in range(4):
        labels = torch.arange(8)[rows] % 5
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if kind == "sharded":
            dist.all_reduce(mean)
            mean /= 2
        losses[kind].append(mean)
torch.testing.assert_close(*map(torch.stack, losses.values()), rtol=1e-4, atol=1e-4)
assert losses["whole"][0] != losses["whole"][-1]
print(f"rank {rank} agrees", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_weights_sharded_over_two_cpu_processes_train_as_whole_ones(tmp_path):
    """By PyTorch alone; Lightning's strategy shards on GPUs only, and refuses CPUs."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # Two processes may write into the same line.
    assert all(f"rank {rank} agrees" in done.stdout for rank in (0, 1))
