"""A plugin: how Hypothesis draws on machines that others use too. Time is no finding there."""

from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
