"""Requests of several users that share a pass."""

import threading

import pytest
import torch

from bcosvit.attribution.passes import Cancelled, cancellable
from bcosvit.predictor import Predictor
from bcosvit.web.batches import Batches
from bcosvit.web.service import Limits
from tests.web.test_service import small_service


class Counter:
    """Doubles numbers, and remembers which came together; the first batch waits to be let go."""

    def __init__(self, most=8, workers=1):
        self.batches, self.begun, self.go_on = [], threading.Event(), threading.Event()
        self.ask = Batches(self.compute, workers, most)

    def compute(self, items):
        self.batches.append(list(items))
        if len(self.batches) == 1:
            self.begun.set()
            assert self.go_on.wait(60)
        if "bad" in items:
            raise ValueError("bad")
        return [2 * item for item in items]

    def waiting(self, count, kind="numbers"):
        """Waits until so many requests wait."""
        for _ in range(6000):
            with self.ask._lock:
                if len(self.ask._waiting.get(kind, [])) == count:
                    return
            threading.Event().wait(0.01)
        raise AssertionError("requests did not come")


def asked(counter, item, kind="numbers", is_cancelled=lambda: False):
    """A thread that asks, and the list that its answer will be in."""
    answers = []

    def ask():
        try:
            with cancellable(is_cancelled):
                answers.append(counter.ask(kind, item))
        except (ValueError, Cancelled) as error:
            answers.append(type(error))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def finish(threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_who_waits_shares_a_batch_of_bounded_size():
    counter = Counter(most=3)
    first = asked(counter, 0)
    assert counter.begun.wait(60)
    others = [asked(counter, item) for item in range(1, 6)]
    counter.waiting(5)
    counter.go_on.set()
    finish([thread for thread, _ in (first, *others)])
    assert [answers for _, answers in (first, *others)] == [[2 * item] for item in range(6)]
    assert sorted(map(len, counter.batches)) == [1, 2, 3]
    assert counter.ask._waiting == {}


def test_other_kinds_do_not_mix():
    counter = Counter()
    first = asked(counter, 0)
    assert counter.begun.wait(60)
    others = [asked(counter, item, kind=item % 2) for item in range(1, 5)]
    counter.waiting(2, kind=0)
    counter.waiting(2, kind=1)
    counter.go_on.set()
    finish([thread for thread, _ in (first, *others)])
    assert sorted(sorted(batch) for batch in counter.batches) == [[0], [1, 3], [2, 4]]


def test_who_leaves_is_not_computed_and_hurts_nobody():
    counter, left = Counter(), threading.Event()
    first = asked(counter, 0)
    assert counter.begun.wait(60)
    leaving = asked(counter, 1, is_cancelled=left.is_set)
    staying = [asked(counter, item) for item in (2, 3)]
    counter.waiting(3)
    left.set()
    finish([leaving[0]])
    assert leaving[1] == [Cancelled]
    counter.go_on.set()
    finish([first[0], *(thread for thread, _ in staying)])
    assert [answers for _, answers in staying] == [[4], [6]]
    assert all(1 not in batch for batch in counter.batches)


def test_a_bad_item_fails_alone():
    counter = Counter()
    first = asked(counter, 0)
    assert counter.begun.wait(60)
    others = [asked(counter, item) for item in (1, "bad", 3)]
    counter.waiting(3)
    counter.go_on.set()
    finish([thread for thread, _ in (first, *others)])
    assert [answers for _, answers in others] == [[2], [ValueError], [6]]


def test_two_workers_compute_at_the_same_time():
    counter = Counter(workers=2)
    first = asked(counter, 0)
    assert counter.begun.wait(60)
    # The first one is still under way.
    second = asked(counter, 1)
    finish([second[0]])
    counter.go_on.set()
    finish([first[0]])
    assert (first[1], second[1]) == ([0], [2])


def test_the_oldest_request_is_next_whatever_its_kind():
    counter = Counter(most=1)
    threads = [asked(counter, 0)[0]]
    assert counter.begun.wait(60)
    for count, (item, kind) in enumerate([(1, "a"), (2, "b"), (3, "a"), (4, "b")]):
        threads.append(asked(counter, item, kind)[0])
        counter.waiting(count // 2 + 1, kind)
    counter.go_on.set()
    finish(threads)
    assert counter.batches == [[0], [1], [2], [3], [4]]


def test_users_share_a_pass_and_get_their_own_answers(tmp_path, pictures, monkeypatch):
    service = small_service(tmp_path, limits=Limits(concurrency=1, batch=4))
    uploads = [service.open(path) for path in pictures[:3]]
    wanted = [(upload, label) for upload in uploads for label in (0, 1)]
    alone = [service.predictor.explain(upload.image, (label,)) for upload, label in wanted]
    sizes, explain_batch = [], Predictor.explain_batch

    def counted(self, images, *args, **options):
        sizes.append(len(images))
        return explain_batch(self, images, *args, **options)

    monkeypatch.setattr(Predictor, "explain_batch", counted)
    found = {}
    # All wait until the model is free.
    batches, go_on = service._batches, threading.Event()
    batches._workers.submit(go_on.wait, 60)
    threads = [
        threading.Thread(target=lambda n=n, u=u, k=k: found.update({n: service.explain(u, k)}))
        for n, (u, k) in enumerate(wanted)
    ]
    for thread in threads:
        thread.start()
    for _ in range(6000):
        with batches._lock:
            if sum(map(len, batches._waiting.values())) == len(wanted):
                break
        threading.Event().wait(0.01)
    go_on.set()
    finish(threads)
    assert sorted(sizes) == [2, 4]
    for place, truth in enumerate(alone):
        mine, theirs = found[place].map, next(iter(truth.attributions.values())).map[0]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert found[place].found.target.tolist() == [wanted[place][1]]


def test_a_batch_is_its_pictures_one_by_one(tmp_path, pictures):
    predictor = small_service(tmp_path).predictor
    images = [predictor.read(path) for path in pictures[:3]]
    for explanation, image in zip(predictor.explain_batch(images), images, strict=True):
        truth = predictor.explain(image)
        torch.testing.assert_close(explanation.logits, truth.logits, rtol=1e-4, atol=1e-6)
        assert torch.equal(explanation.target, truth.target)
    with pytest.raises(RuntimeError):
        predictor.explain_batch([images[0], images[1][:, :8]])
