"""The table of hostile and odd media files: what each is called, its bytes, and what must become of it.

All of them are made here by code, the same each time; the largest has a megabyte.
"""

import functools

from tests.kit.hostile.bad_pictures import bad_pictures
from tests.kit.hostile.case import ACCEPTED, TOO_LARGE, UNREADABLE, Case
from tests.kit.hostile.films import films
from tests.kit.hostile.noises import noises
from tests.kit.hostile.pictures import odd_pictures

__all__ = ["ACCEPTED", "TOO_LARGE", "UNREADABLE", "Case", "cases"]


@functools.cache
def cases() -> dict[str, Case]:
    """The whole table by modality and name, as `image/png-1x1`."""
    found = [*odd_pictures(), *bad_pictures(), *films(), *noises()]
    table = {f"{case.modality}/{case.name}": case for case in found}
    assert len(table) == len(found), "two files have one name"
    return table
