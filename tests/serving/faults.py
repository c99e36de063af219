"""The fault suite: parts of the real service are killed and frozen while it works, then the service itself."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from consumer_shim.client import ProducerError
from consumer_shim.tickets import PullTicket
from producer.wire.pb import encoder_cache_pb2 as pb
from tests.integration.transports.kit import send
from tests.kit.leftovers import leftovers, snapshot
from tests.serving.pulls import Freeze, judge
from tests.serving.service import CALL_S, EXPIRY_S, SLACK_S, Service, code_of, image, wait_for
from tests.serving.staged import STAGES, StagedConsumer, digest, ending
from tests.serving.table import Record

DOWN_OR_BUSY = ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
DIED = (*DOWN_OR_BUSY, "INTERNAL")
"""An item whose process was killed twice ends so; never as a mistake of its client."""
PULL_S = 3.0
EXIT_S = 5.0
"""'At once', for a process that has libraries to unload."""
DRAINED_S = 30.0
AGENT_S = 45.0
"""By when a frozen agent was found so, ended and started again."""


def children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def workers(service: Service) -> list[int]:
    """The preprocessing processes: forks of the fork server."""
    servers = [pid for pid in children(service.pid) if name(pid) == "forkserver" or "forkserver" in command(pid)]
    return [child for pid in servers for child in children(pid)]


def agents(service: Service) -> list[int]:
    """The processes in which network transports live."""
    return [pid for pid in children(service.pid) if "agent_main" in command(pid)]


def worker_kills(service: Service, record: Record, scale: float) -> None:
    """Preprocessing processes are killed while all of them have work."""
    for _ in range(max(3, int(15 * scale))):
        calls = [service.send(*service.new_pictures(2, 224), timeout_s=30.0) for _ in range(6)]
        time.sleep(random.uniform(0, 0.05))
        send(signal.SIGKILL, *random.sample(found := workers(service), min(len(found), random.choice([1, 2]))))
        service.check(record, service.collect(record, calls, *DIED))
    service.check_works(record)
    service.check_settled(record, EXPIRY_S)


def worker_freezes(service: Service, record: Record, scale: float) -> None:
    """Preprocessing processes stand still: what they had ends by its deadline, and they are replaced."""
    for _ in range(max(1, int(4 * scale))):
        frozen = workers(service)
        send(signal.SIGSTOP, *frozen)
        try:
            calls = [service.send(*service.new_pictures(2), timeout_s=random.choice([0.5, 10.0])) for _ in range(6)]
            service.check(record, service.collect(record, calls, *DIED))
            service.check_works(record)  # though nobody lets them go on
        finally:
            send(signal.SIGCONT, *frozen)
    service.check_settled(record, EXPIRY_S)


def _pull(service: Service, record: Record, consumer: StagedConsumer, stage: str, act: Callable[[], None]) -> str:
    """One pull of a known picture from the real service; how it ended."""
    one = random.choice(service.pictures)
    (outcome,) = service.clients[0].encode([image(one)], CALL_S)
    if isinstance(outcome, ProducerError):
        record.tried += 1
        record.ended(code_of(outcome))
        return code_of(outcome)
    ticket = PullTicket.from_message(outcome, service.server.address)
    code, found, sentence = ending(consumer, consumer.run(ticket, PULL_S, stage, act))
    judge(record, digest(service.truth[one]), code, found, sentence)
    return code


def service_freezes(service: Service, record: Record, scale: float) -> None:
    """The whole service stands still, at each stage of a pull over shared memory and gRPC, with items in hand."""
    service.check_works(record)
    for transport in ("shm", "grpc"):
        with StagedConsumer(transport) as consumer:
            for stage in islice(cycle(STAGES), max(8, int(60 * scale))):
                calls = [service.send(*service.new_pictures(1), timeout_s=random.choice([0.05, 20.0]))]
                with Freeze([service.pid], random.uniform(0, 0.1)) as freeze:
                    _pull(service, record, consumer, stage, freeze)
                service.check(record, service.collect(record, calls, *DOWN_OR_BUSY))
            record.leaks(int(not consumer.settles()), "landing memory in use after the last pull")
    service.check_settled(record, EXPIRY_S)


def agent_faults(service: Service, record: Record, scale: float) -> None:
    """A transport's process is killed, and once frozen: its pulls fail by name until it is back, others go on."""
    service.check_works(record)
    with StagedConsumer("nixl") as consumer, StagedConsumer("grpc") as other:
        for number in range(max(1, int(4 * scale)) + 1):
            frozen = agents(service) if number == 0 else []
            send(signal.SIGSTOP if frozen else signal.SIGKILL, *agents(service))
            for _ in range(3):
                _pull(service, record, consumer, "", lambda: None)
            record.expect(_pull(service, record, other, "", lambda: None) == "READY", "gRPC failed with NIXL's agent")
            back = wait_for(lambda: _pull(service, record, consumer, "", lambda: None) == "READY", AGENT_S)
            record.expect(back, f"no pull over NIXL {AGENT_S:.0f} s after its agent was hit")
            send(signal.SIGCONT, *frozen)
        record.leaks(int(not consumer.settles()), "landing memory in use after the last pull")
    service.check_settled(record, EXPIRY_S)


def drain(service: Service, record: Record, scale: float) -> None:
    """SIGTERM under load: NOT_SERVING, no new work, one outcome for each item, leases honoured, and exit status 0."""
    before = service.new_pictures(4)
    kept = service.collect(record, [service.send(one) for one in before], "OK")
    statuses: list[int] = []
    channel, _ = service.raw_stub()
    with channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        watcher = threading.Thread(target=_follow, args=(watch, statuses), daemon=True)
        watcher.start()
        calls = [service.send(*service.new_pictures(2, 224)) for _ in range(6)]
        os.kill(service.pid, signal.SIGTERM)
        wait_for(lambda: statuses[-1:] == [health_pb2.HealthCheckResponse.NOT_SERVING], SLACK_S)
        calls += [service.send(*service.new_pictures(1)) for _ in range(4)]
        service.check(record, [*service.collect(record, calls, "OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED"), *kept])
        watcher.join(DRAINED_S)
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    record.expect(statuses[-1:] == [not_serving], f"health said {statuses} while the service drained")
    _expect_end(service, record, 0, DRAINED_S)


def _follow(watch: Iterator[health_pb2.HealthCheckResponse], statuses: list[int]) -> None:
    try:
        statuses.extend(response.status for response in watch)
    except grpc.RpcError:
        return  # the service has ended


def _expect_end(service: Service, record: Record, code: int, bound_s: float) -> None:
    """It ends by itself in time, with this exit status and all its processes."""
    if not wait_for(lambda: not service.server.running, bound_s + SLACK_S):
        record.hangs(f"the service had not ended {bound_s:.0f} s after its signal")
        record.tried += 1
    ending = service.server.stop()
    record.expect(ending is not None and ending.code == code, f"it ended as {ending}, expected exit status {code}")
    record.leaks(len(ending.killed) if ending else 0, f"had to be killed: {ending}")


def restart(service: Service, record: Record, scale: float) -> None:
    """kill -9 under clients that try again, and a new start on the same port: nothing is left, and all goes on."""
    before = snapshot()
    old = service.collect(record, [service.send(*service.new_pictures(4))], "OK")
    service.check(record, old)
    stopping = threading.Event()
    found: list[str] = []
    clients = [threading.Thread(target=_persist, args=(service, n, stopping, found)) for n in range(4)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    service.server.kill()
    service.server.stop()
    wait_for(lambda: not leftovers(before), SLACK_S)
    left = leftovers(before)
    record.leaks(len(left), "; ".join(left))
    service.start()
    wait_for(lambda: found[-4:] == ["OK"] * 4, CALL_S)
    stopping.set()
    for client in clients:
        client.join(CALL_S)
    record.tried += len(found)
    for code in found:
        record.ended(code)
        record.expect(code in DOWN_OR_BUSY, f"a client with retries got {code}")
    record.expect(found[-1:] == ["OK"], "clients with retries did not get through after the start")
    for _, ticket in old:
        record.tried += 1
        record.ended(_refusal_of(service, ticket))
    record.expect(record.outcomes["EPOCH_MISMATCH"] == len(old), "a ticket of the life before was not refused by name")
    service.check(record, service.collect(record, [service.send(*[one for one, _ in old])], "OK"))
    service.check_settled(record, EXPIRY_S)


def _persist(service: Service, number: int, stopping: threading.Event, found: list[str]) -> None:
    """A client that encodes the same picture again and again."""
    while not stopping.wait(0.2):
        try:
            (outcome,) = service.clients[number].encode([image([*service.truth][number])], SLACK_S)
        except ProducerError as error:
            found.append(code_of(error))
            continue
        found.append(code_of(outcome))
        if isinstance(outcome, pb.Ticket):
            service.clients[number].release(outcome.lease_id, SLACK_S)


def _refusal_of(service: Service, ticket: pb.Ticket) -> str:
    try:
        service.clients[0].fetch(ticket, CALL_S)
    except ProducerError as error:
        return error.reason
    return "OK"


def second_signal(service: Service, record: Record, scale: float) -> None:
    """SIGTERM with leases held, and again: it ends at once, with the signal's status."""
    service.collect(record, [service.send(*service.new_pictures(2))], "OK")
    os.kill(service.pid, signal.SIGTERM)
    time.sleep(1.0)
    record.expect(service.server.running, "it did not wait for the leases")
    os.kill(service.pid, signal.SIGTERM)
    _expect_end(service, record, 128 + signal.SIGTERM, EXIT_S)


CASES = (worker_kills, worker_freezes, service_freezes, agent_faults, drain)
RESTARTS = (restart, second_signal)
"""They start the service once more, which takes half a minute."""
