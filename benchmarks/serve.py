"""Simulates fifty concurrent users of `bcosvit serve` for a minute.

    python benchmarks/serve.py --weights bcos_vit_lite2_imagenet
    python benchmarks/serve.py                   # a small model with random weights

It prints errors, mixed-up results, memory and latencies, and the answers per second as a share of
those of one process that calls the same functions in a loop. Every user has one image and requests
explanations and regions of it, class by class. Every answer is compared with the result for the
same image without a server. Users and server share the machine, so latencies include the work of
the users, whose seconds on the processor are printed. ``--through gradio`` asks in two steps, as
the page does, and gets the drawn maps as well.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from bcosvit import ModelConfig, StemConfig, create_model, save
from bcosvit.data.scenes import Scenes
from bcosvit.predictor import Predictor
from bcosvit.web.service import Box, ExplanationService


@dataclass
class Tally:
    """The results of all users."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class User:
    """An image and its true sums: for each class in total, and over the left half."""

    path: Path
    sums: list[float]
    lefts: list[float]


def small_model(folder: Path) -> Path:
    backbone = StemConfig(widths=(16, 32))
    config = ModelConfig(
        width=64, num_heads=2, depth=2, image_size=48, num_classes=8, backbone=backbone
    )
    save(create_model(config), folder / "model.safetensors")
    return folder / "model.safetensors"


def users(service: ExplanationService, count: int, folder: Path) -> list[User]:
    size = service.predictor.transform.image_size
    left = Box(x=0, y=0, width=size // 2, height=size)
    scenes, found = Scenes("val", size=max(2 * size, 64), length=count), []
    for index in range(count):
        path = folder / f"{index}.png"
        scenes[index].image.save(path)
        picture = service.open(path)
        labels = range(min(8, len(service.predictor.class_names)))
        truth = service.predictor.explain(picture.image, labels)
        sums = [truth.sums(label).contributions for label in labels]
        maps = truth.attributions[service.methods[0]].map
        lefts = maps[:, :, : left.width].double().sum((1, 2)).tolist()
        found.append(User(path, sums, lefts))
    return found


def same(got: Any, expected: Any) -> Any:
    """Compares up to rounding, which differs between processes."""
    return np.isclose(got, expected, rtol=1e-4, atol=1e-6)


def different(people: list[User]) -> float:
    """Returns the share of pairs of users whose sums for a class differ."""
    sums = np.array([user.sums for user in people])
    alike = same(sums[:, None], sums[None]).sum() - sums.size
    return 1 - alike / (sums.size * (len(people) - 1))


async def call(client: httpx.AsyncClient, name: str, data: list[Any]) -> dict[str, Any]:
    """Sends a request to the API, which takes two steps."""
    started = await client.post(f"/gradio_api/call/{name}", json={"data": data})
    started.raise_for_status()
    streamed = await client.get(f"/gradio_api/call/{name}/{started.json()['event_id']}")
    *_, event, answer = (line for line in streamed.text.splitlines() if line)
    if event != "event: complete":
        raise RuntimeError(f"{event}, {answer}")
    return json.loads(answer.removeprefix("data: "))[0]


async def ask(client: httpx.AsyncClient, name: str, **arguments: Any) -> dict[str, Any]:
    """Sends a request that is answered at once."""
    answer = await client.post(f"/api/{name}", json=arguments)
    answer.raise_for_status()
    return answer.json()


async def use(address: str, user: User, size: int, end: float, through: str, tally: Tally) -> None:
    dice = random.Random(str(user.path))
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        sent = await client.post(
            "/gradio_api/upload", files={"files": (user.path.name, user.path.read_bytes())}
        )
        path = sent.json()[0]
        photo = {"path": path, "meta": {"_type": "gradio.FileData"}}
        box = {"x": 0, "y": 0, "width": size // 2, "height": size}
        while time.monotonic() < end:
            label, start = dice.randrange(len(user.sums)), time.perf_counter()
            try:
                if dice.random() < 0.5:
                    if through == "gradio":
                        got = await call(client, "explain", [photo, str(label), "", 0.75, False])
                    else:
                        got = await ask(client, "explain", picture=path, label=str(label))
                    got, expected = got["contributions"], user.sums[label]
                else:
                    if through == "gradio":
                        got = await call(client, "region", [photo, str(label), *box.values()])
                    else:
                        got = await ask(client, "region", picture=path, label=str(label), **box)
                    got, expected = got["together"], user.lefts[label]
            except (httpx.HTTPError, RuntimeError) as error:
                tally.errors.append(repr(error))
                continue
            tally.seconds.append(time.perf_counter() - start)
            if not same(got, expected):
                tally.mixed.append(f"{user.path.name}, class {label}: {got} is not {expected}")


def alone(service: ExplanationService, people: list[User], size: int, seconds: float) -> float:
    """Returns the answers per second of one process that asks itself the users' questions."""
    dice, answers, end = random.Random(0), 0, time.monotonic() + seconds
    left = Box(x=0, y=0, width=size // 2, height=size)
    while time.monotonic() < end:
        user = dice.choice(people)
        picture, label = service.open(user.path), dice.randrange(len(user.sums))
        if dice.random() < 0.5:
            service.sums(picture, label)
        else:
            service.region(picture, label, left)
        answers += 1
    return answers / seconds


def megabytes(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def processor_seconds(process: int) -> float:
    """What a process has had of the processor until now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def watch(process: int, end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(5)
        tally.memory.append(megabytes(process))


async def everybody(
    address: str, process: int, people: list[User], size: int, seconds: float, through: str
) -> Tally:
    tally, end = Tally(), time.monotonic() + seconds
    visits = [use(address, user, size, end, through, tally) for user in people]
    await asyncio.gather(watch(process, end, tally), *visits)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--through", choices=("api", "gradio"), default="api")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = given.weights or small_model(folder)
        service = ExplanationService(predictor=Predictor.load(weights, "cpu"))
        people = users(service, given.users, folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bcosvit", "serve", "--weights", str(weights)]
        command += ["--port", str(port), "--device", "cpu"]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=surroundings
        ) as server:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            start = megabytes(server.pid)
            size = service.predictor.transform.image_size
            before = processor_seconds(server.pid), time.process_time()
            visits = everybody(address, server.pid, people, size, given.seconds, given.through)
            tally = asyncio.run(visits)
            took = processor_seconds(server.pid) - before[0], time.process_time() - before[1]
            server.terminate()
        # Without its cache, which the server's began without.
        fresh = ExplanationService(predictor=Predictor.load(weights, "cpu"))
        torch.set_num_threads(1)
        in_a_loop = alone(fresh, people, size, given.seconds)
    print(f"images with different sums: {different(people):.2%} of all pairs")
    report(tally, given.users, given.seconds, start)
    print(f"processor     {took[0]:.1f} s by the server, {took[1]:.1f} s by its users")
    share = len(tally.seconds) / given.seconds / in_a_loop
    print(
        f"one process in a loop gives {in_a_loop:.1f} answers per second, the server {share:.2f} ×"
    )


def report(tally: Tally, count: int, seconds: float, start: float) -> None:
    print(f"{count} users, {seconds:g} s: {len(tally.seconds)} answers", end=" ")
    print(f"({len(tally.seconds) / seconds:.1f} per second)")
    print(f"errors        {len(tally.errors)}", *tally.errors[:3], sep="\n  ")
    print(f"mixed results {len(tally.mixed)}", *tally.mixed[:3], sep="\n  ")
    for share in (50, 90, 99, 100):
        print(f"latency       {np.percentile(tally.seconds, share):6.2f} s at {share} %")
    steps = " → ".join(f"{each:.0f}" for each in [start, *tally.memory])
    print(f"memory (RSS)  {steps} MB, every 5 s from before the first request")
    if tally.errors or tally.mixed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
