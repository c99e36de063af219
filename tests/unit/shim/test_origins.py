"""Whom a request is for: through the middleware to the producer and to vLLM, and from vLLM to the pull."""

import json
import logging
from collections.abc import Iterator

import grpc
import pytest

from consumer_shim import logs
from consumer_shim.logs import ShimLogger
from consumer_shim.pull import Pull, PullState
from consumer_shim.tickets import PullTicket
from producer.wire.origin import NOBODY, ORIGIN_PARAM, Origin, work_for
from producer.wire.tracing import Tracing
from tests.kit.collector import Collector, named
from tests.unit.shim import test_middleware
from tests.unit.shim.test_middleware import PATH, Encoder, Stack, chat, response, serving
from tests.unit.shim.test_scheduler import Rig as SchedulerRig

TRACE_ID = "a" * 32
TRACEPARENT = f"00-{TRACE_ID}-{'b' * 16}-01"
HEADERS = [(b"x-request-id", b"mine"), (b"traceparent", TRACEPARENT.encode())]
KEY = "0123456789abcdef" * 4
