"""Pods: the address `kubernetes:NAMESPACE/POD`, and the client of the cluster's API that the fleet uses as well."""

from holdfast.sandboxes.kubernetes.pod import Pod
from holdfast.sandboxes.kubernetes.status import PodStatus, read_status

__all__ = ["Pod", "PodStatus", "read_status"]
