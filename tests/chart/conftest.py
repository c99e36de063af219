"""What the chart's tests share."""

from hypothesis import HealthCheck, settings

# How long an example takes is no property of the chart: a busy machine must not fail a test.
settings.register_profile("ec-producer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ec-producer")
