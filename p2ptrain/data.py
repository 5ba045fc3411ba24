"""Data of a swarm whose peers come and go: `ElasticSampler` (see ``docs/data.md``)."""

from p2ptrain.compute.elastic_sampler import ElasticSampler
from p2ptrain.core.data_ledger import EpochCount

__all__ = ["ElasticSampler", "EpochCount"]
