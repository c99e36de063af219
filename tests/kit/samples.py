"""What a registry of metrics, or a scrape of one, says; and whether that is what was declared."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from producer.wire.metric import PREFIX, Declaration

_OWN_LABELS = {"histogram": {"le"}}


def total(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of the samples `ec_producer_<name>` that carry these labels; 0 where there is none."""
    return _sum(registry.collect(), PREFIX + name, labels)


def scraped(text: str, name: str, **labels: str) -> float:
    """As `total`, of the text of a scrape and the whole name."""
    return _sum(families(text), name, labels)


def families(text: str) -> list[Metric]:
    """Those of a scrape."""
    return list(text_string_to_metric_families(text))


def strangers(
    found: Iterable[Metric], declared: Iterable[Declaration], more_labels: Iterable[str] = ()
) -> list[tuple[str, dict[str, str]]]:
    """Samples with our prefix that no declaration allows: of unknown names, labels or values.

    `more_labels` are those that whoever serves them adds to each.
    """
    by_name = {one.full_name: one for one in declared}
    added = set(more_labels)
    return [
        (sample.name, sample.labels)
        for family in found
        for sample in family.samples
        if sample.name.startswith(PREFIX) and not _allowed(by_name.get(_base(family)), sample.labels, added)
    ]


def _base(family: Metric) -> str:
    """The declared name of a family; a scrape adds to that of an info, and makes another one of times of creation."""
    return family.name.removesuffix("_info").removesuffix("_created")


def _allowed(declared: Declaration | None, labels: dict[str, str], added: set[str]) -> bool:
    if declared is None:
        return False
    own = {name: value for name, value in labels.items() if name not in added | _OWN_LABELS.get(declared.kind, set())}
    if declared.kind == "info" and not own:
        return True  # what it tells is not known yet
    return own.keys() == declared.labels.keys() and all(declared.allows(*item) for item in own.items())


def _sum(found: Iterable[Metric], name: str, labels: dict[str, str]) -> float:
    samples = (sample for family in found for sample in family.samples)
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())
