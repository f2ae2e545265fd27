"""Reads the metrics of workers as Prometheus would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from prometheus_client.openmetrics import parser

_families: Final[Any] = parser.text_string_to_metric_families
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


class Scraped:
    """The samples of one answer."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in _families(text) for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name with these labels."""
        return float(
            sum(
                sample.value
                for sample in self.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
        )

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label of a name."""
        return {sample.labels[label] for sample in self.samples if sample.name == name}


async def scrape(url: str) -> Scraped:
    headers: Mapping[str, str] = {"Accept": OPENMETRICS}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.get(url) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("application/openmetrics")
        return Scraped(await response.text())
