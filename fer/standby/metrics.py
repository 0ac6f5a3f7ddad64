"""What the service counts, as Prometheus reads it. The parent holds it, so figures outlive engines."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fer.standby.member import ROLES
from fer.standby.outage import Outage
from fer.standby.preemptible import Preemptible
from fer.standby.router import Router
from fer.standby.supervisor import STATES, Supervisor

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample of each counter that nobody reads

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.3, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)

_PARTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)


class _Seen(Collector):
    """What supervisor and router know, read whenever somebody asks."""

    def __init__(self, supervisor: Supervisor, router: Router) -> None:
        self._supervisor, self._router = supervisor, router

    def collect(self) -> Iterator[Metric]:
        supervisor, router = self._supervisor, self._router
        text = "Requests under way, those that wait among them"
        yield GaugeMetricFamily("fer_requests_in_flight", text, value=router.in_flight)
        yield CounterMetricFamily("fer_restarts", "Engines started again", value=supervisor.restarts)
        yield CounterMetricFamily("fer_switches", "Planned switches", value=supervisor.switches)
        text = "Answers that another engine completed"
        yield CounterMetricFamily("fer_answers_resumed", text, value=router.resumed)
        text = "Resumed answers whose tokens came out otherwise the second time"
        yield CounterMetricFamily("fer_answers_differed", text, value=router.differed)
        text = "Requests that another engine began again"
        yield CounterMetricFamily("fer_requests_retried", text, value=router.retried)
        states = GaugeMetricFamily("fer_state", "1 for the state the service is in", labels=["state"])
        for state in STATES:
            states.add_metric([state], float(supervisor.state == state))
        yield states
        roles = GaugeMetricFamily("fer_members", "Engines by role", labels=["role"])
        batch = [supervisor.batch.member] if supervisor.batch is not None else []
        members = [*supervisor.members, *batch]
        for role in ROLES:
            roles.add_metric([role], sum(member.state == role for member in members))
        yield roles
        text = "Updates to another model, by what became of them"
        updates = CounterMetricFamily("fer_updates", text, labels=["result"])
        updates.add_metric(["done"], supervisor.update.done)
        updates.add_metric(["failed"], supervisor.update.failed)
        yield updates
        yield GaugeMetricFamily("fer_version", "Which model is served, counted from 1", value=self._number())
        if supervisor.batch is not None:
            yield from self._batch(supervisor.batch)

    def _number(self) -> int:
        return self._supervisor.succession.version.number

    def _batch(self, batch: Preemptible) -> Iterator[Metric]:
        text = "Requests of the batch engine under way, those that wait among them"
        yield GaugeMetricFamily("fer_batch_requests_in_flight", text, value=batch.router.in_flight)
        text = "Batch engines that were ended, by why: an engine lacked memory, or an operator's order"
        ended = CounterMetricFamily("fer_batch_preemptions", text, labels=["why"])
        for why in ("memory", "order"):
            ended.add_metric([why], batch.preempted[why])
        yield ended
        text = "Answers that another batch engine completed"
        yield CounterMetricFamily("fer_batch_answers_resumed", text, value=batch.router.resumed)


class Metrics:
    """The service's figures, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "fer_requests", "Requests answered, by endpoint and HTTP status", ["endpoint", "code"], registry=registry
        )
        self._prompt = Counter("fer_prompt_tokens", "Tokens of prompts", registry=registry)
        self._made = Counter("fer_generated_tokens", "Tokens of answers", registry=registry)
        self._token_s = Histogram(
            "fer_death_to_token_seconds",
            "Seconds from an active engine's death to the next token, where a request waited for one",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._active_s = Histogram(
            "fer_death_to_active_seconds",
            "Seconds from an active engine's death to the next active one",
            buckets=_BUCKETS,
            registry=registry,
        )

        self._promotion_s = Histogram(
            "fer_promotion_seconds",
            "Seconds of each part of the promotion of an engine after a death; fence is part of claim",
            ["part"],
            buckets=_PARTS,
            registry=registry,
        )

        self._back_s = Histogram(
            "fer_batch_back_seconds",
            "Seconds from a batch engine's end to the next one that answers",
            buckets=_BUCKETS,
            registry=registry,
        )

    def watch(self, supervisor: Supervisor, router: Router) -> None:
        """Show what these two know as well."""
        self._registry.register(_Seen(supervisor, router))

    def request(self, endpoint: str, code: int) -> None:
        """A request has been answered."""
        self._requests.labels(endpoint, str(code)).inc()

    def tokens(self, prompt: int, made: int) -> None:
        """An answer has ended, complete or not."""
        self._prompt.inc(prompt)
        self._made.inc(made)

    def outage(self, outage: Outage) -> None:
        """An outage has ended."""
        for part, seconds in outage.parts().items():
            self._promotion_s.labels(part).observe(seconds)
        self._active_s.observe((outage.active - outage.died) / 1e9)
        if outage.token:
            self._token_s.observe((outage.token - outage.died) / 1e9)

    def batch_back(self, seconds: float) -> None:
        """The batch engine answers again."""
        self._back_s.observe(seconds)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
