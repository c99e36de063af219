"""The media suite: every hostile and odd file, sent to the real service: each ends as it must, and all goes on."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from consumer_shim.client import ProducerError
from producer.wire.modality import modality_number
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.kit.hostile import ACCEPTED, Case
from tests.kit.hostile.bad_pictures import bad_pictures
from tests.kit.hostile.films import films
from tests.kit.hostile.pictures import odd_pictures
from tests.serving.faults import workers
from tests.serving.service import CALL_S, EXPIRY_S, PREPROCESS_BYTES, Service, Usage
from tests.serving.table import Record

AT_ONCE = 4
FILE_S = 60.0
"""Above what preprocessing one file may take, so that the service has the last word."""
SAMPLE_S = 0.1
LEAKY = re.compile(r"0x[0-9a-fA-F]{6,}|/(tmp|proc|home|usr|root|work|etc)/|Traceback")
"""What a reason must not tell: addresses, paths, code."""


def _files(service: Service, record: Record, scale: float, cases: Callable[[], Iterable[Case]]) -> None:
    """Sends each file, some at a time; below scale 1 only some of them."""
    with _memory_watched(service, record):
        chosen = islice(cases(), 0, None, max(1, round(1 / scale)))
        while group := list(islice(chosen, AT_ONCE)):
            calls = [(case, service.clients[0].stub.Encode.future(_request(case), timeout=FILE_S)) for case in group]
            for case, call in calls:
                _judge(service, record, case, call)
            if record.tried % 40 < AT_ONCE:
                service.check_works(record)
    service.check_works(record)
    service.check_settled(record, EXPIRY_S)


def _request(case: Case) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.MediaItem(modality=modality_number(case.modality), data=case.data)])


def _judge(service: Service, record: Record, case: Case, call: Any) -> None:
    record.tried += 1
    if call.exception(FILE_S + CALL_S) is not None:
        record.hangs(f"{case.name}: {call.code().name} after {FILE_S:.0f} s")
        return
    (outcome,) = call.result().outcomes
    if outcome.HasField("ticket"):
        record.ended("OK")
        record.expect(case.outcome == ACCEPTED, f"{case.name} was encoded, expected {case.outcome}")
        service.check(record, [(case.data, outcome.ticket)])
        return
    error = ProducerError.from_status(outcome.error)
    record.ended(error.reason)
    record.expect(error.code.name == "INVALID_ARGUMENT", f"{case.name}: {error.code.name} {error.reason}: {error}")
    record.expect(error.reason == case.outcome, f"{case.name}: {error.reason}, expected {case.outcome}: {error}")
    record.expect(not LEAKY.search(str(error)), f"{case.name}: its reason tells too much: {error}")


@contextmanager
def _memory_watched(service: Service, record: Record) -> Iterator[None]:
    """Counts a process that takes more memory than a file may, in its body."""
    done = threading.Event()
    base = {pid: Usage.of(pid).rss_bytes for pid in (service.pid, *workers(service))}
    allowed = PREPROCESS_BYTES + max(base.values())
    most = 0

    def watch() -> None:
        nonlocal most
        while not done.wait(SAMPLE_S):
            for pid in (service.pid, *workers(service)):
                try:
                    most = max(most, Usage.of(pid).rss_bytes)
                except (OSError, KeyError):  # it was replaced meanwhile
                    continue

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    done.set()
    watcher.join()
    record.leaks(int(most > allowed), f"a process took {most >> 20} MiB; {allowed >> 20} MiB are allowed")


def pictures_that_are_odd(service: Service, record: Record, scale: float) -> None:
    _files(service, record, scale, odd_pictures)


def pictures_that_are_bad(service: Service, record: Record, scale: float) -> None:
    _files(service, record, scale, bad_pictures)


def videos(service: Service, record: Record, scale: float) -> None:
    _files(service, record, scale, films)


CASES = (pictures_that_are_odd, pictures_that_are_bad, videos)
