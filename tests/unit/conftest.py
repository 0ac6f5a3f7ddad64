"""How property tests run."""

from __future__ import annotations

import hypothesis

# How long an example takes on a busy machine is no finding.
hypothesis.settings.register_profile(
    "fer", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("fer")
