"""The mailbox: everything arrives, in order, on the loop, and what comes together costs one wake-up."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from producer.mailbox import Mailbox


class CountingLoop:
    """Counts wake-ups. It does not reproduce a loop but for the two methods that a mailbox uses."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.num_wake_ups = 0

    def call_soon_threadsafe(self, callback: Callable[[], Any]) -> None:
        self.num_wake_ups += 1
        self._loop.call_soon_threadsafe(callback)

    def is_closed(self) -> bool:
        return self._loop.is_closed()


def opened(letters: list[Any]) -> tuple[CountingLoop, Mailbox[Any]]:
    loop: Any = CountingLoop(asyncio.get_running_loop())
    return loop, Mailbox(loop, letters.append)


async def test_what_comes_together_costs_one_wake_up() -> None:
    letters: list[int] = []
    loop, mailbox = opened(letters)
    for turn in range(3):
        thread = threading.Thread(target=lambda: list(map(mailbox.post, range(100))))
        thread.start()
        thread.join()
        assert letters == list(range(100)) * turn
        await asyncio.sleep(0)
        assert letters == list(range(100)) * (turn + 1)
        assert loop.num_wake_ups == turn + 1


async def test_nothing_is_lost_however_threads_and_loop_meet() -> None:
    letters: list[tuple[int, int]] = []
    _, mailbox = opened(letters)

    def post(thread: int) -> None:
        for number in range(2000):
            mailbox.post((thread, number))

    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while len(letters) < 4 * 2000:
        assert any(thread.is_alive() for thread in threads) or len(letters) == 4 * 2000 or mailbox._is_woken
        await asyncio.sleep(0)
    for number, thread in enumerate(threads):
        thread.join()
        assert [letter for letter in letters if letter[0] == number] == [(number, one) for one in range(2000)]


async def test_a_letter_that_is_posted_by_a_delivery_arrives_too() -> None:
    letters: list[int] = []

    def deliver(letter: int) -> None:
        letters.append(letter)
        if letter < 3:
            mailbox.post(letter + 1)

    mailbox = Mailbox(asyncio.get_running_loop(), deliver)
    mailbox.post(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert letters == [0, 1, 2, 3]


def test_what_is_posted_to_a_loop_that_has_ended_is_lost() -> None:
    loop = asyncio.new_event_loop()
    letters: list[int] = []
    mailbox = Mailbox(loop, letters.append)
    loop.close()
    mailbox.post(1)
    mailbox.post(2)
    assert letters == []
