"""How a metric is declared as an attribute of a class, and made for an instance of it."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import Self

from producer.wire.metric import ONE, SECONDS, Allowed, Declaration, Kind

T = TypeVar("T")

_MOST_ZEROS = 32


class Read(Collector):
    """A counter that somebody else keeps, and that is asked for at each scrape."""

    def __init__(self, name: str, meaning: str, registry: CollectorRegistry) -> None:
        self._family = name, meaning
        self._value: Callable[[], float] = float
        registry.register(self)

    def set_function(self, value: Callable[[], float]) -> None:
        self._value = value

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(*self._family, value=self._value())


class Metric(Generic[T]):
    """An attribute of `Metrics`: what it is declared with, and of an instance, the metric itself."""

    def __init__(self, make: Callable[..., T], kind: Kind, unit: str, meaning: str, look: str, **more: Any) -> None:
        self._make = make
        self._values: dict[str, Any] = {"kind": kind, "unit": unit, "meaning": meaning, "look": look, **more}
        self.declaration: Declaration

    def __set_name__(self, owner: type, name: str) -> None:
        self.declaration = Declaration(name=name, **self._values)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Of the class only: an instance's attribute of the same name, which `open` makes, is found before this."""
        return self

    def open(self, registry: CollectorRegistry) -> T:
        """The metric. A counter of few series has them all from the start, or their first increase would go unseen."""
        declared = self.declaration
        more: dict[str, Any] = {"buckets": declared.buckets} if declared.buckets else {}
        if declared.labels and declared.kind != "info":
            more["labelnames"] = list(declared.labels)
        metric = self._make(declared.full_name, declared.meaning, registry=registry, **more)
        if "labelnames" in more:  # a look-up of its own takes three times as long as counting does
            vars(metric)["labels"] = functools.cache(metric.labels)  # type: ignore[attr-defined]
        if isinstance(metric, Counter) and declared.labels and declared.num_series <= _MOST_ZEROS:
            for values in itertools.product(*declared.labels.values()):
                metric.labels(*values)
        return metric


def counter(unit: str, meaning: str, look: str, **labels: Allowed) -> Metric[Counter]:
    return Metric(Counter, "counter", unit, meaning, look, labels=labels)


def read(unit: str, meaning: str, look: str) -> Metric[Read]:
    return Metric(Read, "counter", unit, meaning, look)


def gauge(unit: str, meaning: str, look: str, **labels: Allowed) -> Metric[Gauge]:
    return Metric(Gauge, "gauge", unit, meaning, look, labels=labels)


def seconds(meaning: str, look: str, **labels: Allowed) -> Metric[Histogram]:
    return Metric(Histogram, "histogram", "seconds", meaning, look, labels=labels, buckets=SECONDS)


def info(meaning: str, look: str, *fields: str) -> Metric[Info]:
    return Metric(Info, "info", "", meaning, look, labels=dict.fromkeys(fields, ONE))
