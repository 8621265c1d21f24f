"""The clients: what user code holds. They speak the Tinker protocol over HTTP to any server that does."""

from mint.client.futures import APIFuture
from mint.client.rest import RestClient
from mint.client.sampling import SamplingClient
from mint.client.service import ServiceClient
from mint.client.training import TrainingClient

__all__ = ["APIFuture", "RestClient", "SamplingClient", "ServiceClient", "TrainingClient"]
