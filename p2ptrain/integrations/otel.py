"""A peer's metrics for OpenTelemetry: the extra ``p2ptrain[otel]``.

::

    with OtelMetrics("http://collector:4318/v1/metrics") as metrics:
        with p2ptrain.Peer(model, optimizer, metrics=metrics) as peer:
            ...

The series are those of the Prometheus endpoint (`runtime/prometheus.py`, docs/metrics.md) except
``p2ptrain_members``, under the same names and with the same attributes, so that one dashboard fits
both. A program that has a meter provider of its own gives that instead of an address.
"""

from typing import Any, Self

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.metrics import MeterProvider as OwnProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import Counter, Gauge

from p2ptrain.ids import Seconds
from p2ptrain.runtime.prometheus import ONE, SERIES


class OtelMetrics:
    """Implements `Metrics`; gives `Peer` its ``metrics``.

    Args:
        endpoint: of a collector, for OTLP over HTTP; empty: as OpenTelemetry's own environment
            variables say, or this machine.
        provider: takes the series instead; it stays open afterwards.
        every_s: the interval between two exports.
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        provider: MeterProvider | None = None,
        every_s: Seconds = 10.0,
    ) -> None:
        self._own: OwnProvider | None = None
        if provider is None:
            exporter = OTLPMetricExporter(endpoint or None)
            reader = PeriodicExportingMetricReader(exporter, export_interval_millis=every_s * 1e3)
            resource = Resource.create({"service.name": "p2ptrain"})
            provider = self._own = OwnProvider([reader], resource=resource)
        meter = provider.get_meter("p2ptrain")
        self._attributes: dict[str, str] = {}
        self._write: dict[str, Any] = {}  # Any: add, set or record of an instrument
        for series in (series for of_kind in SERIES.values() for series in of_kind):
            name = f"p2ptrain_{series.name}"
            if series.metric is Counter:
                self._write[series.name] = meter.create_counter(name, description=series.text).add
            elif series.metric is Gauge:
                self._write[series.name] = meter.create_gauge(name, description=series.text).set
            else:
                buckets = getattr(series.metric, "keywords", {})["buckets"]
                histogram = meter.create_histogram(
                    name, description=series.text, explicit_bucket_boundaries_advisory=buckets
                )
                self._write[series.name] = histogram.record

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Count one record; kinds without a metric are passed over."""
        if kind == "started":
            self._attributes = {"peer": fields["peer"]}
        for series in SERIES.get(kind, ()):
            value = 1 if series.field == ONE else fields[series.field or series.name]
            if value is not None:
                labels = {label: fields[label] for label in series.labels}
                self._write[series.name](value, {**self._attributes, **labels})

    def close(self) -> None:
        """Export what there is, and close what this object has opened. Idempotent."""
        own, self._own = self._own, None
        if own:
            own.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
