"""etcd: who is here (leases), who else is (watches), and what stays when etcd is not there."""

from baton.registry.client import Credentials, EtcdClient, EtcdRefused, RegistryState
from baton.registry.host import machine_id
from baton.registry.registry import Registration, Registry
from baton.registry.view import View

__all__ = [
    "Credentials",
    "EtcdClient",
    "EtcdRefused",
    "Registration",
    "Registry",
    "RegistryState",
    "View",
    "machine_id",
]
